"""This daemon between its predecessor and its successor: what it takes over, and what it leaves behind.

Owns the handover file, which it writes at an ordinary exit too, the operation behind `melld renew`, one renewal at a
time, and all that a renewal needs of the daemon.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from melld.api.admission import Admission
from melld.api.connections.entrance import Entrance
from melld.api.stored_responses import StoredResponses
from melld.config import Config, CpuDevices
from melld.control.messages import CONTROL_SOCKET, Renew, RenewalStep
from melld.control.runtime_directory import ControlSocket, open_control_socket, runtime_directory, state_directory
from melld.control.server import ControlServer, OpenCall
from melld.control.status import DaemonState
from melld.daemon.model import ServedModel
from melld.daemon.renewal.channel import Inherited
from melld.daemon.renewal.handover import Event, State
from melld.daemon.renewal.legacy import Legacy, NotLeft, leave, take
from melld.daemon.renewal.new import NewSide
from melld.daemon.renewal.old import OldSide
from melld.daemon.settings import Settings
from melld.daemon.systemd import Notifier, Supervision
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.watch import Condition
from melld.errors import ConfigError, MelldError

log = logging.getLogger("melld.renewal")

OWN_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Meant for this process only."""


class NotRenewed(MelldError):
    """The daemon cannot be renewed now."""

    status = 409
    code = "not_renewed"


class Succession:
    """The daemon's predecessor, if any, and its successor.  `end` ends the daemon as a signal would."""

    answering: ControlServer

    def __init__(self, config: Config, condition: Condition, end: Callable[[], None]) -> None:
        self.condition = condition
        self.end = end
        self.before = NewSide.found(os.environ)
        self.side: OldSide | None = None
        """The renewal of this daemon in progress, or done."""
        self.started_with: Mapping[str, str] = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES}
        self._has_stand_in = self.before is not None and self.before.inherited.has_stand_in
        self._config = config
        self._directory = runtime_directory(config.server.runtime_directory, os.environ)
        self._file_in = state_directory(os.environ, self._directory)

    # -- start -------------------------------------------------------------------------------------------------------

    def open(self, reload: Callable[[], Config], supervision: Supervision) -> Settings:
        """Open the settings, with the predecessor's sockets if both listen at the same address."""
        listeners, is_adopted, server = None, False, self._config.server
        if self.before is not None:
            there, listeners = self.before.inherited, self.before.listeners
            is_adopted = there.is_adopted
            if not is_adopted and (server.host, server.port) != there.address:
                for listener in listeners:  # clients should not wait at the old address once the other has ended
                    listener.close()
                listeners = None
        self.settings = Settings(self._config, reload, supervision, listeners, is_adopted=is_adopted)
        self.stored = StoredResponses(lambda: self.settings.config.server, lambda: self.settings.keys.owners())  # noqa: PLW0108  they change
        return self.settings

    def open_control(self) -> ControlSocket:
        """Open the control socket, or share the predecessor's if it is in the same directory."""
        path = self._directory / CONTROL_SOCKET
        if self.before is not None and self.before.control.getsockname() == str(path):
            self.control = ControlSocket(path, self.before.lock, self.before.control)
            self.control.is_given_away = True  # until this daemon takes over
        else:
            self.control = open_control_socket(self._directory)
        return self.control

    def sized(self, config: Config) -> Config:
        """Return the configuration with the CPU devices' whole memory, part of which the predecessor still uses."""
        nbytes = self.before.inherited.memory_bytes if self.before is not None else 0
        cpu = config.devices.cpu or CpuDevices()
        if not nbytes or cpu.memory_bytes is not None:
            return config
        cpu = msgspec.structs.replace(cpu, memory_bytes=nbytes // cpu.count)
        return msgspec.structs.replace(config, devices=msgspec.structs.replace(config.devices, cpu=cpu))

    def begin(
        self,
        models: Sequence[ServedModel],
        landlord: LandlordShell,
        notifier: Notifier,
        feed: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Take the daemon's parts; hold workers back until the predecessor hands over their devices.

        Raises:
            ConfigError: this daemon cannot take over from another.
        """
        self.models, self.landlord, self.notifier, self.speak_for_service = models, landlord, notifier, feed
        if self.before is not None:
            if (reason := self._why_never_renewed()) is not None:
                raise ConfigError("renewal", reason)
            self.before.begin(models, self.condition, self.inherit)

    async def prepared(self) -> None:
        """Get a device from the predecessor, now that everything that can fail without one has been tried."""
        if self.before is not None:
            await self.before.prepared()

    async def take_over(self) -> None:
        """Return when this daemon is to take requests, after reading the handover file."""
        if self.before is not None:
            await self.before.take_over()
        self.inherit()

    async def serves(self, admission: Admission, entrance: Entrance) -> None:
        """Start answering the operator's commands, and serving the predecessor's idle connections."""
        self.admission, self.entrance = admission, entrance
        if self.before is not None:
            self.before.joined(entrance.join)
            await self.speak()

    async def speak(self) -> None:
        """Answer the operator's commands, and be the service manager's main process."""
        self.control.is_given_away = False
        await self.speak_for_service(True)
        await self.answering.listen()  # which fails where there are no descriptors left

    def inherit(self) -> None:
        """Read the handover file of an earlier daemon."""
        legacy = take(self._file_in)
        self.stored.take(legacy.responses)
        for name, stories in legacy.stories.items():
            model = next((one for one in self.models if one.name == name), self.models[0])
            model.parts.stories.keep(stories)
        if self.before is not None and self.before.is_alone:
            self.stored.maker_ended()

    # -- renewal -----------------------------------------------------------------------------------------------------

    async def renew(self, _asked: Renew, call: OpenCall) -> None:
        """Replace this daemon, reporting progress to the operator, until either daemon serves.

        It is called off if the operator leaves before.

        Raises:
            NotRenewed: it cannot be replaced now.
            NotLeft: the handover file cannot be written.
        """
        self._check_renewable()  # a daemon that has not read its predecessor's file yet would replace it
        await self.leave()
        self._check_renewable()  # another renewal may have begun meanwhile
        self.side = side = OldSide(self)
        call.left.add_done_callback(lambda _: side.happen(Event.CALLED_OFF))
        with contextlib.suppress(ConnectionError):
            while True:
                side.news.clear()
                await call.say(told := side.told())
                if told.step is not RenewalStep.UNDER_WAY:
                    return
                await side.news.wait()

    def _check_renewable(self) -> None:
        if self.condition.state is not DaemonState.READY:
            raise NotRenewed(f"the daemon is {self.condition.state}: try again once it is ready")
        if self.side is not None:
            raise NotRenewed(f"a renewal is already in progress: {self.side.told().told}")
        if self.before is not None and not self.before.is_alone:
            pid = self.before.inherited.pid
            raise NotRenewed(f"pid {pid}, which this daemon has taken over from, is still finishing its calls")
        if (reason := self._why_never_renewed()) is not None:
            raise NotRenewed(reason)

    def _why_never_renewed(self) -> str | None:
        """Return why devices cannot be handed over one by one; None if they can."""
        if self._config.cluster.address is not None:
            return "a cluster's devices are allocated by Ray: restart its daemon instead of renewing it"
        return self.landlord.division.why_none_is_empty

    def inheritance(self) -> tuple[Inherited, list[int]]:
        """Return what a successor gets first, with its descriptors."""
        config, places = self.settings.config, self.models[0].parts.fleet.places.values()
        houses = self.landlord.landlord.houses.values()
        inherited = Inherited(
            pid=os.getpid(),
            address=(config.server.host, config.server.port),
            is_adopted=self.settings.is_adopted,
            devices=tuple(device for place in places for device in place.slot.devices),
            memory_bytes=sum(one.ledger.memory_bytes for one in houses if one.name.startswith("cpu")),
            has_stand_in=self._has_stand_in or not self.notifier.has_manager,
        )
        sockets = (self.control.listener, *self.settings.listeners)
        return inherited, [self.control.lock, *(one.fileno() for one in sockets)]

    # -- end ---------------------------------------------------------------------------------------------------------

    def call_off(self) -> bool:
        """Cancel a renewal in progress, as this daemon ends; return True if another already takes the requests."""
        if self.side is not None and self.side.state not in (State.HANDED_OVER, State.ENDED):
            self.side.happen(Event.STOPPED)
            self.side = None
        return self.side is not None

    async def leave(self) -> None:
        """Write the handover file.

        Raises:
            NotLeft: it cannot be written.
        """
        stories = {model.name: ended for model in self.models if (ended := model.parts.stories.ended())}
        await asyncio.to_thread(leave, self._file_in, Legacy(self.stored.left(), stories))

    async def ending(self) -> None:
        """End the predecessor too if it is still running, and write the handover file."""
        if self.before is not None:
            await self.before.end_other()
        try:
            await self.leave()
        except NotLeft as error:
            log.warning("%s", error)

    def close(self) -> None:
        """Leave the channel to a successor, as this daemon ends."""
        if self.side is not None:
            self.side.last_words()

    @property
    def needs_stand_in(self) -> bool:
        """Return True, at the end, if another daemon keeps serving and whoever waits for this one cannot know that."""
        return self.side is not None and not (self._has_stand_in or self.notifier.has_manager)
