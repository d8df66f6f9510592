"""What a pass found out about one policy: the ground of its conditions, status and history."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvsteward_contract.document import DocumentRollout, PolicyDocument
from kvsteward_contract.policy import PolicySpec, Refusal

from .generations import Generation, State, serving
from .world import Pod


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, and is to run, of an accepted spec."""

    resource_generation: int  # metadata.generation of the policy as it was read
    spec: PolicySpec  # what governs
    image: str  # of the engine, pinned
    target: Generation
    generations: tuple[Generation, ...]  # oldest first, the target last
    documents: Mapping[str, PolicyDocument]  # by generation
    versions: Mapping[str, str]  # of those documents
    deadline_exceeded: bool = False  # the Deployment gave its rolling update up
    trouble: str = ""  # what the API server answered when it refused a write

    @property
    def wanted(self) -> int:
        return self.spec.engine.replicas

    @property
    def serving(self) -> Generation | None:
        return serving(self.generations)

    @property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(pod for generation in self.generations for pod in generation.pods)

    def rollout(self, generation: Generation) -> DocumentRollout:
        """What the generation's document allows."""
        return self.documents[generation.name].rollout

    def confirmed_cold(self, pod: Pod) -> bool:
        """Whether no new match can happen in this pod: its engine has confirmed so, or doesn't run.

        A confirmation of an earlier engagement of the switch doesn't count. (Sidecars that don't say which resource
        they have seen are believed.)
        """
        observation = pod.observation
        return not pod.engine_running or (
            observation is not None
            and observation.cold_requested
            and observation.cold_confirmed
            and (observation.resource_generation or self.resource_generation) >= self.resource_generation
        )

    def acknowledged(self, generation: Generation) -> int:
        """Pods whose engine has confirmed the generation's document."""
        version = self.versions[generation.name]
        return sum(
            pod.observation is not None
            and pod.observation.acknowledged_version == version
            and (not pod.terminating or generation.state is State.DRAINING)
            for pod in generation.pods
        )


@dataclass(frozen=True, slots=True)
class Situation:
    """`running` None: nothing was ever accepted, or what an earlier policy of this name left must go first."""

    refusal: Refusal | None
    running: Running | None
    leftovers: tuple[str, ...] = ()  # objects of an earlier policy of the same name, being collected
