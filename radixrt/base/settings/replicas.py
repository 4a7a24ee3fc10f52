"""Declares the settings of replicas of the engine: in the same server, and on other machines."""

from collections.abc import Iterator
from dataclasses import dataclass

from radixrt.base.settings.setting import TCP_ADDRESS, section

MAX_REPLICAS = 64

_replicas = section("Replicas")


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """How many replicas of the engine there are, and how those on other machines join."""

    dp: int = _replicas(
        1,
        "Replicas of the engine behind one router (docs/routing.md). --kernel-threads and "
        "--max-total-tokens are of each. 0: all are on other machines (--replica-listen).",
        within=(0, MAX_REPLICAS),
    )
    replica_listen: str | None = _replicas(
        None,
        "ZeroMQ address at which engines on other machines join, such as tcp://0.0.0.0:30100; "
        "needs --join-token-file.",
        metavar="ADDRESS",
        form=TCP_ADDRESS,
    )
    join: str | None = _replicas(
        None,
        "Join the server whose --replica-listen is at this address, such as tcp://10.0.0.1:30100; "
        "--host and --port then serve /health and /ready only.",
        metavar="ADDRESS",
        form=TCP_ADDRESS,
    )
    join_token_file: str | None = _replicas(
        None,
        "File with the secret of the links between machines, of at least 32 random characters; "
        "make it with: openssl rand -hex 32.",
        metavar="FILE",
    )

    @property
    def is_linked(self) -> bool:
        """Whether there are links to engines or an ingress on other machines."""
        return self.join is not None or self.replica_listen is not None

    @property
    def is_routed(self) -> bool:
        """Whether the engine has several replicas, or may have, so that a router needs to know
        their load and their caches."""
        return self.dp != 1 or self.is_linked

    @property
    def max_replicas(self) -> int:
        """Replicas, with those that may join."""
        return self.dp if self.replica_listen is None else MAX_REPLICAS

    def replica_problems(self) -> Iterator[str]:
        """One sentence for each pair of these settings that exclude each other."""
        if self.join is not None and self.replica_listen is not None:
            yield "--join and --replica-listen are for different machines: leave one out."
        if self.is_linked != (self.join_token_file is not None):
            yield "--join-token-file goes with --join or --replica-listen, which need it."
        if self.dp == 0 and self.replica_listen is None:
            yield "--dp 0 starts no engine, so others must join: set --replica-listen."
