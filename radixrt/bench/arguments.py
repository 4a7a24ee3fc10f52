"""Declares the flags of ``radixrt bench``, apart from the benchmarks, so that ``--help`` imports
none of them."""

import argparse
from typing import Literal, get_args

from radixrt.base.server_url import add_url_flag
from radixrt.base.settings.setting import EvictionPolicyName, SchedulePolicyName

EndpointName = Literal["completions", "chat"]
WorkloadName = Literal["shared-prefix", "random", "multi-turn"]
HintLevel = Literal["none", "session", "program", "exact"]
RouterName = Literal["radixrt", "random", "round-robin", "power-of-two", "session-hash"]

EVICTION_POLICIES: tuple[str, ...] = get_args(EvictionPolicyName)
SCHEDULE_POLICIES: tuple[str, ...] = get_args(SchedulePolicyName)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt bench serve``."""
    server = parser.add_argument_group("Server")
    add_url_flag(server)
    server.add_argument("--model", help="name in the API (default: the server's first)")
    server.add_argument("--api-key", help="sent as a bearer token (default: environment variable RADIXRT_API_KEY)")  # fmt: skip
    server.add_argument("--endpoint", choices=get_args(EndpointName), default="completions", help="which API to use (default: %(default)s)")  # fmt: skip
    server.add_argument("--prompts", choices=("auto", "tokens", "text"), default="auto", help="prompts as token ids or as pseudo-words; auto: token ids where the vocabulary's size is known (default: %(default)s)")  # fmt: skip
    server.add_argument("--vocab-size", type=positive, metavar="N", help="prompts use token ids below this (default: the server's vocabulary size)")  # fmt: skip
    server.add_argument("--respect-eos", action="store_true", help="do not send ignore_eos, which some servers refuse; answers may end early")  # fmt: skip
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte after which a request has failed (default: %(default)s)")  # fmt: skip

    load = parser.add_argument_group("Load")
    load.add_argument("--workload", choices=get_args(WorkloadName), default="shared-prefix", help="questions over shared documents, unrelated prompts, or chats (default: %(default)s)")  # fmt: skip
    load.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="requests in all (default: %(default)s)")  # fmt: skip
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=positive, metavar="N", help="closed loop: number of concurrent requests (default: 16)")  # fmt: skip
    arrivals.add_argument("--rate", type=float, metavar="R", help="open loop: R requests (or chats) start per second, as a Poisson process")  # fmt: skip
    load.add_argument("--burstiness", type=_rate, default=1.0, metavar="G", help="shape of the gamma-distributed gaps of --rate: 1 is a Poisson process, less comes in bursts, more is more even (default: %(default)s)")  # fmt: skip
    load.add_argument("--dataset", metavar="FILE", help="prompts in place of --workload: ShareGPT, JSON lines with prompt or messages, or a recorded trace with its times")  # fmt: skip
    load.add_argument("--trace-speed", type=_rate, default=1.0, metavar="X", help="let the requests of a recorded trace arrive X times as fast (default: %(default)s)")  # fmt: skip
    load.add_argument("--input-len", type=positive, default=64, metavar="N", help="tokens of a prompt or question (default: %(default)s)")  # fmt: skip
    load.add_argument("--output-len", type=positive, default=64, metavar="N", help="tokens of an answer (default: %(default)s)")  # fmt: skip
    load.add_argument("--length-spread", type=float, default=0.0, metavar="SIGMA", help="make both lengths log-normal with this sigma around their means; 0: all equal (default: %(default)s)")  # fmt: skip
    load.add_argument("--prefix-len", type=not_negative, default=512, metavar="N", help="tokens of a shared document, or of the chats' system prompt (default: %(default)s)")  # fmt: skip
    load.add_argument("--groups", type=positive, default=4, metavar="N", help="shared documents (default: %(default)s)")  # fmt: skip
    load.add_argument("--turns", type=positive, default=4, metavar="N", help="questions of a chat (default: %(default)s)")  # fmt: skip
    load.add_argument("--warmup", type=not_negative, default=2, metavar="N", help="unrelated requests to send first, unmeasured (default: %(default)s)")  # fmt: skip
    load.add_argument("--flush-cache", action="store_true", help="empty a radixrt server's cache before the measurement")  # fmt: skip
    load.add_argument("--seed", type=not_negative, default=0, help="of prompts and arrivals (default: %(default)s)")  # fmt: skip

    output = parser.add_argument_group("Output")
    _add_json(output, "settings, summary and every request")
    output.add_argument("--plot", metavar="FILE", help="draw latencies and timeline, for example to run.png")  # fmt: skip
    output.add_argument("--slo", type=_objective, nargs="+", metavar="NAME=MS", help="service-level objectives of a request (ttft, tpot, e2e), such as ttft=500 tpot=50; the goodput is the rate of requests that meet all")  # fmt: skip
    output.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="send nothing; compare two earlier runs")  # fmt: skip


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``radixrt bench cache``."""
    parser.add_argument("trace", nargs="+", metavar="TRACE", help="recorded requests: JSON lines with hash_ids or runs, gzipped or not")  # fmt: skip
    compared = parser.add_argument_group("Compared settings")
    compared.add_argument("--tokens", type=_tokens, nargs="+", default=[2**19 << i for i in range(5)], metavar="N", help="sizes of the KV pool in tokens, with K or M for 2^10 or 2^20 (default: 0.5M 1M 2M 4M 8M)")  # fmt: skip
    compared.add_argument("--policy", nargs="+", choices=EVICTION_POLICIES, default=["value"], help="eviction policies (default: value)")  # fmt: skip
    compared.add_argument("--schedule-policy", nargs="+", choices=SCHEDULE_POLICIES, default=["fcfs"], help="order of the waiting queue (default: fcfs, in which all policies admit in the same order)")  # fmt: skip
    compared.add_argument("--hints", nargs="+", choices=get_args(HintLevel), default=["none"], help="levels of cache hints that clients send, for traces with sessions (default: none)")  # fmt: skip
    compared.add_argument("--hint-error", type=_error, nargs="+", default=[0.5], metavar="S", help="with --hints program: standard deviation of the logarithm of the stated duration of a tool over the recorded one (default: 0.5)")  # fmt: skip
    compared.add_argument("--replicas", type=positive, nargs="+", default=[1], metavar="N", help="engines behind a router, each with its part of the pool and of the prefill rate (default: 1)")  # fmt: skip
    compared.add_argument("--router", nargs="+", choices=get_args(RouterName), default=["radixrt"], help="routing rules of several replicas (default: radixrt)")  # fmt: skip
    compared.add_argument("--closed-loop", action="store_true", help="a session's next request waits for the previous answer; default: all requests arrive at their recorded times")  # fmt: skip

    model = parser.add_argument_group("The simulated engine")
    model.add_argument("--page-size", type=positive, default=512, metavar="N", help="tokens in a page; below 512, pages of simulated answers dominate the results (default: %(default)s)")  # fmt: skip
    model.add_argument("--max-running", type=positive, default=256, metavar="N", help="maximum of concurrent requests; their pages are locked (default: %(default)s)")  # fmt: skip
    model.add_argument("--prefill-rate", type=positive, default=100_000, metavar="N", help="prompt tokens computed in a second by all replicas together (default: %(default)s)")  # fmt: skip
    model.add_argument("--decode-ms", type=float, default=10.0, metavar="MS", help="duration of a decode step of the running batch (default: %(default)s)")  # fmt: skip
    model.add_argument("--tokens-per-symbol", type=positive, default=8, metavar="N", help="tokens that are simulated as one; a power of two, at most 512 (default: %(default)s)")  # fmt: skip
    model.add_argument("--speed", type=_rate, default=1.0, metavar="X", help="let requests arrive X times as fast as recorded (default: %(default)s)")  # fmt: skip
    model.add_argument("--disk-tokens", type=_tokens, default=0, metavar="N", help="size of a disk for KV in tokens, as --cache-dir has (default: none)")  # fmt: skip
    model.add_argument("--disk-rate", type=positive, default=1_000_000, metavar="N", help="tokens that it reads or writes in a second: its bytes a second over those of a token (default: %(default)s)")  # fmt: skip
    model.add_argument("--disk-min-chance", type=float, metavar="P", help="chance of a return from which on a page that was used once is written; 0 writes all (default: the server's)")  # fmt: skip
    model.add_argument("--requests", type=positive, metavar="N", help="replay the first N requests only")  # fmt: skip

    output = parser.add_argument_group("Output")
    _add_json(output, "every row")
    output.add_argument("--plot", metavar="FILE", help="draw hit rates over pool sizes, for example to cache.png")  # fmt: skip


def _add_json(parser: argparse._ActionsContainer, what: str) -> None:
    """Declare ``--json``; ``what`` names the content of the file."""
    parser.add_argument("--json", metavar="FILE", help=f"write {what}; - for stdout")


def _tokens(text: str) -> int:
    """A number of tokens: 524288, 512K or 0.5M."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        value = int(float(text if factor == 1 else text[:-1]) * factor)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens like 0.5M, not {text!r}"
        ) from error
    if value < 1024:
        raise argparse.ArgumentTypeError(f"must be at least 1024 tokens, not {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _objective(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition("=")
    if name not in ("ttft", "tpot", "e2e"):
        raise argparse.ArgumentTypeError(f"must be ttft=MS, tpot=MS or e2e=MS, not {text!r}")
    return name, _rate(milliseconds)


def _error(text: str) -> float:
    value = float(text)
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"must be between 0 and 10, not {text}")
    return value


def positive(text: str) -> int:
    """A flag's type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def not_negative(text: str) -> int:
    """A flag's type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value
