"""One deterministic run of the whole control path: operator, sidecars, engines and clients over simulated wires.

`run(scenario)` gives a `Result`; it never raises for what the system under test does wrong, only for its own faults.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
from kvsteward_contract import wire
from kvsteward_contract.identity import admin_token

from . import api_server
from .api_server import ApiRefusal, ApiServer
from .clients import Clients, write_keys
from .clock import SimulatedLoop, run_simulated
from .end_state import EndState, end_state
from .network import Network, Server, Session
from .nodes import Nodes
from .observer import Observer
from .operator_api import NAME as OPERATOR_NAME
from .operator_process import OPERATOR_KEY, OperatorProcess
from .pod import Pod, World
from .scenario import (
    OPERATOR,
    TENANTS,
    Action,
    Burst,
    CrashOperator,
    CutApi,
    CutScrapes,
    DeletePod,
    Edit,
    EndWatches,
    HoldCold,
    LoseWatch,
    Meddle,
    PlantPage,
    ReleaseCold,
    RestartEngine,
    RestartSidecar,
    Scenario,
    SlowApi,
    Tenants,
    initial_spec,
    set_path,
)
from .trace import Trace

NAMESPACE, POLICY = "serving", "chat"
START_SECONDS = 4.0  # until the first pods serve, with some margin
CALM_SECONDS = 180.0  # everything must be where it belongs this long after the last disturbance
RECOVERY_SECONDS = 60.0  # a watch that went silent is noticed and begun again within this
QUICK_SECONDS = 6.0  # one that was ended


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run. `broken` holds the invariants that did not hold, the first of each kind."""

    scenario: Scenario
    broken: tuple[str, ...]
    end: EndState
    seen: Counter[str]  # what happened how often, for those who want to know whether a search met it
    trace: Trace

    def report(self) -> str:
        """For people: what broke, what the run was told to do, and what happened last."""
        broken = "\n".join(self.broken) or "nothing broke"
        return f"{broken}\n\nwhat it was told:\n{self.scenario}\n\nwhat happened:\n{self.trace.text()}"

    def check(self) -> None:
        """Raises AssertionError with the report when anything broke."""
        if self.broken:
            raise AssertionError(self.report())


def run(scenario: Scenario, expected: EndState | None = None, calm: float = CALM_SECONDS) -> Result:
    """Plays a scenario. With `expected`, the run must come to that end state within `calm` seconds after the last
    disturbance; without, it goes on for so long."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with _determinism(scenario.seed), _quiet():
            loop = SimulatedLoop()
            return run_simulated(_Run(loop, scenario, folder, expected, calm).play(), loop)
    finally:
        shutil.rmtree(folder)


@contextmanager
def _determinism(seed: int) -> Iterator[None]:
    """Chance that product code draws for itself comes from the seed too."""
    state, chance = random.getstate(), random.Random(f"secrets {seed}")
    random.seed(f"random {seed}")
    try:
        with mock.patch.object(secrets, "token_hex", lambda size: chance.randbytes(size).hex()):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Product code warns of what the simulation does to it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Run:
    def __init__(
        self, loop: SimulatedLoop, scenario: Scenario, folder: Path, expected: EndState | None, calm: float
    ) -> None:
        self.loop, self.scenario, self.expected, self.calm = loop, scenario, expected, calm
        self.trace = Trace(loop.time)
        chance = random.Random(f"world {scenario.seed}")
        network = Network(loop, chance)
        keys = folder / "tenants"
        keys.mkdir()
        self.api = ApiServer(loop, chance)
        self.observer = Observer(loop, self.trace, self.api, POLICY, NAMESPACE)
        self.world = World(loop, chance, self.trace, network, folder, keys, self.observer.matched, self._tell)
        network.servers[(api_server.HOST, api_server.PORT)] = Server(self.api.handle)
        loop.set_exception_handler(self._crashed)
        self.operator: OperatorProcess | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    def _tell(self, event: str, name: str) -> None:
        if (pod := self.nodes.pods.get(name)) is not None:
            {
                "confirmed": self.observer.confirmed,
                "violated": self.observer.violated,
                "held": self.observer.held,
                "released": self.observer.released,
            }[event](pod)

    def _crashed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.trace.breaks("nothing crashes", f"{context.get('message')}: {context.get('exception')!r}")

    async def play(self) -> Result:
        world, scenario = self.world, self.scenario
        write_keys(world.tenant_keys, TENANTS, self.loop.unix())
        self.nodes = Nodes(world, self.api, self.observer.admitted, NAMESPACE)
        self.nodes.audited = lambda pod: self.observer.audit(pod, idle=False)
        self.operator = OperatorProcess(world, self.api)
        self._apply()
        self.clients = Clients(world, self.nodes, random.Random(f"clients {scenario.seed}"), self.observer.answered)
        await asyncio.sleep(START_SECONDS)
        for action in scenario.actions:
            await asyncio.sleep(action.after)
            self.trace.note("ACTION", repr(action))
            self._do(action)
        for pod in self.nodes.pods.values():
            self.observer.unplant(pod)
        await asyncio.sleep(2.0)
        self._calm()
        self._do(scenario.final)
        end = await self._settle()
        await self.clients.stop()
        await asyncio.sleep(2.0)  # what clients gave up has been cancelled
        self._finish()
        result = Result(
            scenario, tuple(self.trace.broken), end, self.observer.seen, self.trace
        )
        self._stop()
        return result

    def _apply(self) -> None:
        self.spec = initial_spec()
        self.api.create(
            {
                "apiVersion": wire.API_VERSION,
                "kind": wire.KIND,
                "metadata": {"name": POLICY, "namespace": NAMESPACE},
                "spec": deepcopy(self.spec),
            }
        )

    # ---- actions

    def _do(self, action: Action) -> None:
        match action:
            case Edit(changes=changes):
                self._edit(changes)
            case HoldCold(pod=number):
                self._ask_pod(number, "POST")
            case ReleaseCold(pod=number):
                self._ask_pod(number, "DELETE")
            case Tenants(present=present):
                write_keys(self.world.tenant_keys, present, self.loop.unix())
            case Burst(requests=count):
                self.clients.burst(count)
            case CrashOperator(down=down, writes=0):
                self._crash_operator(down)
            case CrashOperator(down=down, writes=writes):
                if self.operator is not None:
                    self.operator.api.last_writes = writes
                    self.operator.api.crash = lambda: self._crash_operator(down)
            case PlantPage(pod=number):
                self._on(number, self.observer.plant)
            case RestartSidecar(pod=number, down=down):
                self._on(number, lambda pod: self.nodes.restart_sidecar(pod, down))
            case RestartEngine(pod=number, down=down):
                self._on(number, lambda pod: self.nodes.restart_engine(pod, down))
            case DeletePod(pod=number):
                self._on(number, self.nodes.delete_pod)
            case CutApi(party=party, seconds=seconds):
                self._trouble(party, seconds + RECOVERY_SECONDS)
                name = self._party(party)
                self.world.network.cut(name, api_server.HOST)
                self._later(seconds, lambda: self._mend(name))
            case SlowApi(party=party, delay=delay, seconds=seconds):
                self._trouble(party, seconds + delay + QUICK_SECONDS)
                name = self._party(party)
                self.world.network.link(name, api_server.HOST).slow = delay
                self._later(seconds, lambda: self._quicken(name))
            case LoseWatch(party=party, about=about):
                self._trouble(party, RECOVERY_SECONDS)
                self.world.network.silence(self._party(party), api_server.HOST, about)
            case EndWatches(expired=expired):
                for pod in self.nodes.pods:
                    self.observer.disturbed(pod, self.loop.time() + QUICK_SECONDS)
                if expired:
                    self.api.compact()
                self.api.end_watches(expired)
            case CutScrapes(pod=number, seconds=seconds):
                self._on(number, lambda pod: self._cut_scrapes(pod, seconds))
            case Meddle(what=what):
                self._meddle(what)
            case _:
                raise AssertionError(f"nobody knows how to do {action!r}")

    def _edit(self, changes: tuple[tuple[str, Any], ...]) -> None:
        wanted = deepcopy(self.spec)
        for path, value in changes:
            set_path(wanted, path, value)
        try:
            self.api.edit(wire.KIND, POLICY, NAMESPACE, lambda body: body.update(spec=deepcopy(wanted)))
        except ApiRefusal as refusal:
            self.trace.note("kubectl", f"refused: {refusal}")
        else:
            self.spec = wanted

    def _crash_operator(self, down: float) -> None:
        if self.operator is not None:
            self.operator.kill()
            self.operator = None
            self._later(down, self._start_operator)

    def _start_operator(self) -> None:
        if self.operator is None:
            self.operator = OperatorProcess(self.world, self.api)

    def _pod(self, number: int) -> Pod | None:
        pods = [self.nodes.pods[name] for name in sorted(self.nodes.pods) if name not in self.nodes.going]
        return pods[number % len(pods)] if pods else None

    def _on(self, number: int, do: Any) -> None:
        if (pod := self._pod(number)) is not None:
            do(pod)

    def _party(self, party: int) -> str:
        pod = None if party == OPERATOR else self._pod(party)
        return OPERATOR_NAME if pod is None else pod.name

    def _trouble(self, party: int, seconds: float) -> None:
        if party != OPERATOR and (pod := self._pod(party)) is not None:
            self.observer.disturbed(pod.name, self.loop.time() + seconds)

    def _mend(self, name: str) -> None:
        self.world.network.link(name, api_server.HOST).cut = False

    def _quicken(self, name: str) -> None:
        self.world.network.link(name, api_server.HOST).slow = 0.0

    def _cut_scrapes(self, pod: Pod, seconds: float) -> None:
        link = self.world.network.link(OPERATOR_NAME, pod.ip)
        link.cut = True
        self._later(seconds, lambda: setattr(link, "cut", False))

    def _ask_pod(self, number: int, method: str) -> None:
        if (pod := self._pod(number)) is not None:
            self.loop.create_task(self._ask(pod, method))

    async def _ask(self, pod: Pod, method: str) -> None:
        """An engineer's curl to the admin port."""
        session = Session(self.world.network, "engineer")
        policy = self.api.find(wire.KIND, POLICY, NAMESPACE)
        assert policy is not None
        headers = {"Authorization": f"Bearer {admin_token(OPERATOR_KEY, policy['metadata']['uid'])}"}
        try:
            async with session.request(
                method, f"http://{pod.ip}:{wire.ADMIN_PORT}/v1/cold", headers=headers
            ) as answer:
                status = answer.status
        except aiohttp.ClientError:
            return  # the sidecar isn't there just now
        self.trace.note("engineer", f"{method} /v1/cold of {pod.name}: {status}")

    def _meddle(self, what: str) -> None:
        self.observer.meddling = True
        documents = [body["metadata"]["name"] for body in self.api.all("ConfigMap")]
        try:
            match what:
                case "annotate the policy":
                    self.api.edit(wire.KIND, POLICY, NAMESPACE, lambda body: _annotate(body, self.loop.time()))
                case "scale the Deployment":
                    self.api.edit("Deployment", POLICY, NAMESPACE, lambda body: body["spec"].update(replicas=3))
                case "raise the document" if documents:
                    self.api.edit("ConfigMap", documents[-1], NAMESPACE, _raise_document)
                case "delete the document" if documents:
                    self.api.delete("ConfigMap", documents[-1], NAMESPACE)
                case "delete the Role":
                    self.api.delete("Role", f"{POLICY}-kvsteward", NAMESPACE)
                case "delete the Service":
                    self.api.delete("Service", POLICY, NAMESPACE)
        except ApiRefusal:
            pass  # not there just now
        finally:
            self.observer.meddling = False

    def _later(self, seconds: float, do: Any) -> None:
        self._timers.add(self.loop.call_later(seconds, do))

    # ---- the end

    def _calm(self) -> None:
        """From here on nothing goes wrong any more; what was lost stays lost."""
        self.trace.note("ACTION", "calm")
        for timer in self._timers:
            timer.cancel()
        self.world.network.heal()
        if self.operator is not None:
            self.operator.api.last_writes = 0
        self._start_operator()
        write_keys(self.world.tenant_keys, TENANTS, self.loop.unix())
        self.clients.pace = 5.0

    async def _settle(self) -> EndState:
        began = self.loop.time()
        while True:
            await asyncio.sleep(2.0)
            end = end_state(self.api, self.nodes)
            if self.expected is None:
                if self.loop.time() - began >= self.calm:
                    return end
            elif end == self.expected:
                self.trace.note("END", "where it belongs")
                return end
            elif self.loop.time() - began >= self.calm:
                self.trace.breaks("the end is that of the undisturbed run", end.difference(self.expected))
                return end

    def _finish(self) -> None:
        for pod in self.nodes.pods.values():
            self.observer.audit(pod, idle=True)
            for failure in pod.sidecar.failures if pod.sidecar else []:
                self.trace.breaks("nothing crashes", f"the sidecar of {pod.name}: {failure!r}")
        for failure in self.operator.failures if self.operator else []:
            self.trace.breaks("nothing crashes", f"the operator: {failure!r}")
        self.observer.events_told()

    def _stop(self) -> None:
        for pod in list(self.nodes.pods.values()):
            pod.remove()
        if self.operator is not None:
            self.operator.kill()


def _annotate(body: dict[str, Any], now: float) -> None:
    body["metadata"].setdefault("annotations", {})["example.com/touched"] = f"{now:.3f}"


def _raise_document(body: dict[str, Any]) -> None:
    data = body["data"]
    for stage in ("Cold", "Shadow", "Canary"):
        data[wire.DOCUMENT_KEY] = data[wire.DOCUMENT_KEY].replace(f'"stage":"{stage}"', '"stage":"Full"')
