"""This daemon between its predecessor and its successor: what it takes over, and what it leaves behind.

Owns the handover file, which it writes at an ordinary exit too, and all that a renewal needs of the daemon.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from melld.api.admission import Admission
from melld.api.connections.entrance import Entrance
from melld.api.stored_responses import StoredResponses
from melld.config import Config, CpuDevices
from melld.control.runtime_directory import (
    ControlSocket,
    open_control_socket,
    runtime_directory,
    state_directory,
)
from melld.control.server import ControlServer
from melld.daemon.model import ServedModel
from melld.daemon.renewal.legacy import Legacy, NotLeft, leave, take
from melld.daemon.renewal.new import NewSide
from melld.daemon.renewal.renewals import Renewals
from melld.daemon.settings import Settings
from melld.daemon.systemd import Notifier, Supervision
from melld.daemon.town.landlord import LandlordShell
from melld.daemon.watch import Condition
from melld.errors import ConfigError

log = logging.getLogger("melld.renewal")

OWN_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID")
"""Meant for this process only."""


class Succession:
    """The daemon's predecessor, if any, and its successors.  `end` ends the daemon as a signal would."""

    settings: Settings
    models: Sequence[ServedModel]
    landlord: LandlordShell
    control: ControlSocket
    answering: ControlServer
    admission: Admission
    entrance: Entrance
    stored: StoredResponses

    def __init__(self, config: Config, condition: Condition, end: Callable[[], None]) -> None:
        self.condition = condition
        self.end = end
        self.before = NewSide.found(os.environ)
        self.started_with: Mapping[str, str] = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES}
        self.renewals = Renewals(self)
        self.has_stand_in = self.before is not None and self.before.inherited.has_stand_in
        self._config = config
        self._directory = runtime_directory(config.server.runtime_directory, os.environ)
        self._file_in = state_directory(os.environ, self._directory)

    def open(self, reload: Callable[[], Config], supervision: Supervision) -> Settings:
        """Open the settings, with the predecessor's sockets if both listen at the same address."""
        listeners, before = None, self.before
        if before is not None:
            server = self._config.server
            if before.inherited.is_adopted or (server.host, server.port) == (
                before.inherited.host,
                before.inherited.port,
            ):
                listeners = before.listeners
            else:  # clients should not wait at the old address once the other daemon has ended
                for listener in before.listeners:
                    listener.close()
        self.settings = Settings(
            self._config, reload, supervision, listeners, is_adopted=before is not None and before.inherited.is_adopted
        )
        self.stored = StoredResponses(lambda: self.settings.config.server, lambda: self.settings.keys.owners())  # noqa: PLW0108  they change
        return self.settings

    def open_control(self) -> ControlSocket:
        """Open the control socket, or share the predecessor's."""
        shared = None if self.before is None else self.before.control_socket(self._directory)
        self.control = shared or open_control_socket(self._directory)
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
        feed: Callable[[bool], Any],
    ) -> None:
        """Take the daemon's parts; hold workers back until the predecessor hands over their devices.

        Raises:
            ConfigError: this daemon cannot take over from another.
        """
        self.models, self.landlord, self.notifier, self.speak_for_service = models, landlord, notifier, feed
        if self.before is not None:
            if (reason := self._why_never_renewed()) is not None:
                raise ConfigError("renewal", reason)
            self.before.begin(models, self.condition, self.end, self.inherit)

    def why_not_renewed(self) -> str | None:
        """Return why another cannot take over from this daemon now; None if one can."""
        if self.before is not None and not self.before.is_alone:
            return (
                f"pid {self.before.inherited.pid}, which this daemon has taken over from, is still finishing its calls"
            )
        return self._why_never_renewed()

    def _why_never_renewed(self) -> str | None:
        """Return why devices cannot be handed over one by one; None if they can."""
        if self._config.cluster.address is not None:
            return "a cluster's devices are allocated by Ray: restart its daemon instead of renewing it"
        return self.landlord.division.why_none_is_empty

    async def prepared(self) -> None:
        """Get a device from the predecessor, now that everything that can fail without one has been tried."""
        if self.before is not None:
            await self.before.prepared()

    async def take_over(self) -> None:
        """Return when this daemon is to take requests, after reading the handover file."""
        if self.before is not None:
            await self.before.take_over()
        else:
            self.inherit()

    async def serves(self, admission: Admission, entrance: Entrance) -> None:
        """Start answering the operator's commands, and serving the predecessor's idle connections."""
        self.admission, self.entrance = admission, entrance
        if self.before is not None:
            self.before.joined(entrance.join)
            self.control.is_given_away = False
            await self.answering.listen()
            await self.speak_for_service(True)

    def inherit(self) -> None:
        """Read the handover file of an earlier daemon."""
        legacy = take(self._file_in)
        self.stored.take(legacy.responses)
        for name, stories in legacy.stories.items():
            model = next((one for one in self.models if one.name == name), self.models[0])
            model.parts.stories.keep(stories)
        if self.before is not None and self.before.is_alone:
            self.stored.maker_ended()

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
            self.before.stopping()
            await self.before.wait_other_ended()
        try:
            await self.leave()
        except NotLeft as error:
            log.warning("%s", error)

    @property
    def needs_stand_in(self) -> bool:
        """Return True if another daemon keeps serving, and whoever waits for this process cannot know that."""
        return self.renewals.is_handed_over and not (self.has_stand_in or self.notifier.has_manager)
