"""What a link asks of those that choose among plans while training goes on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from thinwire.plan import Plan


class Chooser(ABC):
    """Says which plan a step has, alike on all ranks; `Allocator` and `Tuner` are the two that there are.

    Attributes:
        key: under which a link's state has the choice.
        title: who chooses, in words.
    """

    key: ClassVar[str]
    title: ClassVar[str]

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """What was chosen last, or is being tried."""

    @property
    def facts(self) -> Sequence[str]:
        """What ranks must agree on beside the plan."""
        return ()

    @abstractmethod
    def next_plan(self, step: int) -> Plan:
        """Return the plan of a step that begins. Collective now and then."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the choice, and what it rests on, as plain numbers and strings."""

    @abstractmethod
    def check(self, state: Mapping[str, Any] | None, *, strict: bool) -> None:
        """Raise `StateError` unless `load_state_dict` can take it over."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` returned; None begins anew."""
