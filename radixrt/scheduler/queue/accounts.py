"""Counts the service that each tenant has got, for the virtual token counter (VTC; Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024).

The tenant with the smallest counter is served next. Counters grow by the tokens that are computed,
over the tenant's weight. A tenant that begins to wait is lifted to the smallest counter of those
that wait, so that idle time earns nothing.
"""

from dataclasses import dataclass

from radixrt.messages.requests import Tenant

INPUT_COST, OUTPUT_COST = 1, 2
"""Costs of a token, as in the paper. Prompt tokens from the cache cost nothing: nobody waits for
them."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant: the tokens that it has got, and its sequences.

    >>> account = Account("", 2.0)
    >>> account.prompt_tokens, account.cached_tokens, account.output_tokens = 32, 22, 3
    >>> account.counter
    8.0
    """

    name: str = ""
    weight: float = 1.0
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the tree."""
    cache_write_tokens: int = 0
    """Prompt tokens that were computed and put into the tree."""
    output_tokens: int = 0
    running: int = 0
    """Sequences in slots."""
    _offset: float = 0.0

    @property
    def counter(self) -> float:
        """The virtual token counter."""
        computed_tokens = self.prompt_tokens - self.cached_tokens
        cost = INPUT_COST * computed_tokens + OUTPUT_COST * self.output_tokens
        return self._offset + cost / self.weight

    def lift(self, least: float) -> None:
        """Raise the counter to ``least``, if it is smaller."""
        self._offset += max(0.0, least - self.counter)

    def set_weight(self, weight: float) -> None:
        """Change the weight from now on; the counter stays."""
        before, self.weight = self.counter, weight
        self._offset += before - self.counter


class Accounts:
    """The tenants that an engine has served."""

    def __init__(self) -> None:
        self._by_name: dict[str, Account] = {}

    def for_tenant(self, tenant: Tenant) -> Account:
        account = self._by_name.get(tenant.name)
        if account is None:
            account = self._by_name[tenant.name] = Account(tenant.name, tenant.weight)
        elif account.weight != tenant.weight:
            account.set_weight(tenant.weight)
        return account

    def largest_share(self) -> Account:
        """The tenant with the most running sequences for its weight."""
        return max(self._by_name.values(), key=lambda account: account.running / account.weight)

    def share_of(self, account: Account) -> float:
        """Share of the engine that a tenant may claim from those that run or are itself: its weight
        in theirs."""
        active = [a for a in self._by_name.values() if a.running or a is account]
        return account.weight / sum(a.weight for a in active)
