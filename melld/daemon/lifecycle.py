"""The daemon's life, from the first signal handler to the last worker's end.

    run:  open ──► start ──► serve ──► drain ──► stop

Owns the order of these steps, the signals, and the messages to the service manager.  Never looks into a request.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

import prometheus_client

from melld.config import Config
from melld.control.messages import Reload, Reloaded, Renew
from melld.control.runtime_directory import ControlSocket
from melld.control.server import Lasting, Operation, serve_control
from melld.control.status import DaemonState
from melld.daemon import preflight
from melld.daemon.metrics import LoopProbe
from melld.daemon.model import ServedModel
from melld.daemon.models import Models
from melld.daemon.operations import operations_of
from melld.daemon.renewal.succession import Succession
from melld.daemon.settings import in_words
from melld.daemon.systemd import Notifier, Supervision, keep_told, take_supervision
from melld.daemon.watch import Condition
from melld.daemon.wiring import make_parts, prepare_frontends
from melld.engine.fleet.place import Place
from melld.engine.hub import check_hub
from melld.engine.pin import check_vllm_version
from melld.errors import ConfigError
from melld.log_lines import take_over_loggers
from melld.tasks import RESTS_S, Tasks, Work

if TYPE_CHECKING:
    from melld.engine.frontend.prepared import Prepared

log = logging.getLogger("melld")


class Daemon:
    """A daemon.  `say` prints progress for people; `reload` reads the configuration again."""

    def __init__(self, config: Config, say: Callable[[str], None], reload: Callable[[], Config]) -> None:
        self.config = config
        self._say = say
        self._reload = reload
        self.failed = self.is_cut_short = False
        self._tasks = Tasks(self._given_up)
        self._condition = Condition(tasks=self._tasks)
        self._hung_up, self._stop, self._abort = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            MelldError: the daemon could not be started.
        """
        self.succession = Succession(self.config, self._condition, self._stop.set)
        supervision = take_supervision(os.environ, os.getpid())
        self._notifier = Notifier(supervision.notify_address)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.succession.close)
            control = self._open(supervision, stack)
            stack.callback(self._models.close_logs)  # after the last worker has ended, to record that too
            stack.push_async_callback(self._tasks.cancel)
            stack.callback(self._parts.template.stop)
            if self._parts.cluster is not None:
                stack.push_async_callback(self._parts.cluster.stop)
            stack.push_async_callback(self._models.close)
            self._listen_to_signals()
            self._tasks.keep("reload", Work(self._reload_at_hang_ups))
            self._beat_s = supervision.beat_interval_s
            parts = self._parts
            self.succession.begin(parts.models, parts.landlord, self._notifier, self._speak_for_service)
            await self._speak_for_service(self.succession.before is None)
            operations = operations_of(self._models.served, self._parts.landlord, self._parts.machines, self)
            operations["reload"] = Operation(Reload, self._on_reload)
            operations["renew"] = Lasting(Renew, self.succession.renew)
            serving = serve_control(operations, self.watch.status, control, listens=self.succession.before is None)
            self.succession.answering = await stack.enter_async_context(serving)
            self._tasks.keep("control socket", Work(self.succession.answering.stay))
            for model in self._models.served:
                self._models.watch(model)
            if not await self._start():
                return
            await stack.enter_async_context(self._serving())
            await self._stop.wait()
            await self._drain()
        self._say("melld: stopped")

    # -- open: all quick checks, before anything slow ---------------------------------------------------------------

    def _open(self, supervision: Supervision, stack: contextlib.AsyncExitStack) -> ControlSocket:
        check_vllm_version()
        config = self.config
        preflight.check_policy(config.scheduler.policy)
        self.settings = self.succession.open(self._reload, supervision)
        stack.callback(self.settings.close)
        for model in config.served:
            preflight.check_model(model.path)
        control = self.succession.open_control()
        stack.callback(control.close)
        for model in config.served:
            self._condition.warnings += check_hub(model.path)
        for remark in self.settings.remarks():
            log.warning("%s", remark)
            self._condition.warnings.append(remark)
        self._parts = make_parts(
            self.succession.sized(config),
            preflight.url_of(self.settings.listeners),
            self._condition,
            self.settings.client_names,
        )
        self.watch = self._parts.watch
        self._models = Models(self._parts, self._condition, self._tasks)
        return control

    # -- start ------------------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Start the workers while the front ends are imported; return False if told to stop in the meantime."""
        progress = preflight.StartProgress(self._places, self._say, self._parts.template.progress)
        progress.begun(self.config)
        saying = asyncio.ensure_future(progress.run())
        starting = asyncio.ensure_future(self._start_both(progress))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():  # told to stop meanwhile
                self._say("melld: stopping")
                self.is_cut_short = True  # the imports go on in their thread, and cannot be stopped
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return False
            self._models.prepared.update(zip(self._models.served, starting.result(), strict=True))
        finally:
            saying.cancel()
            stopping.cancel()
        return not self._stop.is_set()

    def _places(self) -> list[Place]:
        return [place for model in self._models.served for place in model.parts.fleet.places.values()]

    async def _start_both(self, progress: preflight.StartProgress) -> list["Prepared"]:
        """Start the workers and prepare the front ends; report a faulty option as such, whichever meets it first."""
        if self._parts.cluster is not None:
            await self._parts.cluster.check()
        else:
            self._parts.template.start()  # its imports take as long as those here
        preparing = asyncio.ensure_future(asyncio.to_thread(prepare_frontends, self._parts))
        if len(self._parts.models) > 1:
            prepared = await preparing
            read = {model: one.frontend.vllm_config for model, one in zip(self._parts.models, prepared, strict=True)}
            if divided := await self._parts.letting.begin(self.succession.sized(self.config), read):
                self._say(f"melld: {divided}")
            await self.succession.prepared()
            await self._parts.landlord.start(progress.became_ready)
            return prepared
        workers = asyncio.ensure_future(self._start_workers(progress))
        try:
            prepared = await preparing
            await self.succession.prepared()
            await workers
            return prepared
        finally:
            workers.cancel()

    async def _start_workers(self, progress: preflight.StartProgress) -> None:
        if self._parts.cluster is not None:
            await self._parts.cluster.start()
        await self._models.served[0].start(progress.became_ready)

    # -- serve ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        from melld.api.app import start_api
        from melld.api.guards.media import media_from_public_addresses
        from melld.api.pages import ApiContext

        registry = prometheus_client.REGISTRY
        await self._models.serve()
        registry.register(self._parts.metrics)
        self._tasks.keep("readings", Work(self.watch.run))
        context = ApiContext(
            models=self._models.served,
            config=lambda: self.settings.config.server,
            keys=lambda: self.settings.keys,
            why_not_ready=self.watch.why_not_ready,
            why_closed=self.watch.why_closed,
            troubled=self._tasks.troubled,
            status=self.watch.status,
            stored=self.succession.stored,
            registry=registry,
        )
        take_over_loggers()
        media: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if not self.config.server.allow_internal_media_urls:
            prepared = self._models.prepared.values()
            domains = [getattr(one.arguments, "allowed_media_domains", None) for one in prepared]
            media = media_from_public_addresses(has_domains=any(domains))
        await self.succession.take_over()
        async with media, start_api(context, self.settings.listeners) as (self.admission, entrance):
            probe = LoopProbe(registry)
            self._condition.state = DaemonState.READY
            await self.succession.serves(self.admission, entrance)
            self._notifier.send(READY="1", STATUS=f"serving on {preflight.url_of(self.settings.listeners)}")
            where, needs_key = self.config.server.runtime_directory, bool(self.settings.keys)
            self._say(preflight.ready_lines(self._models.served, self.watch.status(), where, needs_key=needs_key))
            try:
                yield
            finally:
                probe.stop()

    # -- drain ------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Refuse new calls; wait for running ones until the deadline or a second signal; then end them."""
        self._condition.state = DaemonState.DRAINING
        if not self.succession.call_off():
            self._notifier.send(STOPPING="1", STATUS="draining")
        self.admission.begin_drain()
        if self.admission.in_flight:
            deadline_s = self.settings.config.server.drain_s
            waits = f"waiting up to {deadline_s:g} s for {self.admission.in_flight} calls"
            self._say(f"melld: {waits} (press Ctrl-C or send SIGTERM again to end them now)")
            await self.admission.wait_or_abort(deadline_s, self._abort)
        await self.succession.ending()
        self._condition.state = DaemonState.STOPPING
        await self._tasks.cancel("reload")  # it looks at sockets that are about to be closed

    # -- signals and the service manager ----------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)

    def _on_stop_signal(self) -> None:
        (self._abort if self._stop.is_set() else self._stop).set()

    async def _reload_at_hang_ups(self) -> None:
        """Reload on every SIGHUP, and notify the service manager if the daemon is ready."""
        while True:
            await self._hung_up.wait()
            self._hung_up.clear()
            if self._condition.state is DaemonState.READY:
                self._notifier.reloading()
            try:
                log.info("reloaded: %s", in_words(await self._on_reload(Reload())))
            except ConfigError as error:
                log.error("reload rejected, keeping the old configuration: %s", error)
                self._condition.reload_warnings = [f"the configuration was not reloaded: {error}"]
            finally:
                if self._condition.state is DaemonState.READY:
                    self._notifier.send(READY="1")

    async def _on_reload(self, _reload: Reload) -> Reloaded:
        reloaded = await self.settings.reload(None if self._parts.cluster is not None else self._models)
        self._condition.reload_warnings = []
        return reloaded

    async def load(self, path: str, name: str) -> ServedModel:
        """Serve one more model: see `Models.load`."""
        async with self.settings.changing:
            return await self._models.load(self.settings.config, path, name)

    async def unload(self, model: ServedModel, now: bool) -> bool:
        """Remove a model that was loaded by hand; return True once it is gone, False for any other model."""
        async with self.settings.changing:
            leaving = self._models.unload(model, now)
        if leaving is not None:
            await asyncio.shield(leaving)
        return leaving is not None or model not in self._models.served

    async def _speak_for_service(self, speaks: bool) -> None:
        """Start or stop notifying the service manager, depending on which daemon is the main process."""
        await self._tasks.cancel("service manager")
        if speaks:
            beat_s, told = self._beat_s, partial(keep_told, self._notifier, self._beat_s, self.watch.beat)
            self._tasks.keep("service manager", Work(told, [min(rest_s, beat_s) for rest_s in RESTS_S]))

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _given_up(self, task: str) -> None:
        """Shut down cleanly: without this task no request is answered, so another daemon must take over."""
        log.error("shutting down: no request can be served without '%s'", task)
        self.failed = True
        self._stop.set()
