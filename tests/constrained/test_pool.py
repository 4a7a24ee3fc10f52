"""Compiling and validating in helper processes: results, sharing, and what hostile input can't
do."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from bench.children import end, start
from radixrt.base.errors import RequestError
from radixrt.base.token_bytes import SavedTokens, TokenBytesTable
from radixrt.constrained.compiler.cache import ByteLru, memory_of
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.helper import Zygote
from radixrt.constrained.compiler.jobs import CompileOptions, PoolConfig
from radixrt.constrained.compiler.pool import CompilePool
from radixrt.constrained.constraint import AnyJson, Choice, Constraint, Ebnf, JsonSchema, Regex
from radixrt.constrained.grammar import Compiled, Grammar, SpanCheck
from radixrt.constrained.loader import load_grammar
from tests.constrained.test_matchers import accepts
from tests.constrained.vocabularies import KINDS, facts_of

KIND = "byte_level_json"
SLOW_PATTERN = {"pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}
SLOW_TEXT = json.dumps("a" * 200)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    KINDS[KIND][0]().save(str(path))
    return str(path)


@pytest.fixture
def with_saved_tokens(tokenizer_json: str, tmp_path: Path) -> Path:
    """A tokenizer.json with the tokens beside it, as the tokenizer process leaves them."""
    file = tmp_path / "tokenizer.json"
    shutil.copy(tokenizer_json, file)
    facts = facts_of(KIND)
    table = TokenBytesTable.from_tokens(facts.tokens)
    SavedTokens(tuple(facts.special_ids), table.ends.tobytes(), table.data).save(file)
    return file


def config_of(tokenizer_json: str, **settings: Any) -> PoolConfig:
    facts = facts_of(KIND)
    return PoolConfig(
        tokenizer_json=tokenizer_json,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        **settings,
    )


@pytest.fixture
def with_pool(tokenizer_json: str) -> Callable[..., Any]:
    """Run a coroutine function of a pool; afterwards no helper is left."""

    def run(body: Callable[[CompilePool], Awaitable[Any]], **settings: Any) -> Any:
        with running_pool(config_of(tokenizer_json, **settings)) as in_pool:
            return in_pool(body)

    return run


@pytest.fixture(scope="module")
def with_shared_pool(tokenizer_json: str) -> Iterator[Callable[..., Any]]:
    """As ``with_pool``, but all tests that end no helper have one pool."""
    with running_pool(config_of(tokenizer_json)) as in_pool:
        yield in_pool


@pytest.fixture(scope="module")
def with_strict_pool(tokenizer_json: str) -> Iterator[Callable[..., Any]]:
    """As ``with_pool``, but all tests have one pool, with little time and memory for a job."""
    config = config_of(tokenizer_json, time_limit_s=2.0, memory_limit_bytes=512 << 20)
    with running_pool(config) as in_pool:
        yield in_pool


@contextlib.contextmanager
def running_pool(config: PoolConfig) -> Iterator[Callable[..., Any]]:
    """A function that runs coroutine functions of one pool; afterwards no helper of it is left."""
    before = {process.pid for process in all_helpers()}
    with asyncio.Runner() as runner:

        async def make() -> CompilePool:
            pool = CompilePool(config)
            pool.start()
            return pool

        pool = runner.run(make())
        _open.append(pool)

        def run(body: Callable[[CompilePool], Awaitable[Any]]) -> Any:
            _helpers_of_others.clear()
            _helpers_of_others.update(before)
            return runner.run(asyncio.wait_for(body(pool), timeout=60))

        try:
            yield run
        finally:
            runner.run(pool.close())
            _open.remove(pool)
    others = {process.pid for one in _open for process in processes_of(one)}
    assert not {process.pid for process in all_helpers()} - before - others


_open: list[CompilePool] = []


def processes_of(pool: CompilePool) -> list[psutil.Process]:
    """Its zygote and its helpers."""
    if pool._zygote is None or not pool._zygote.is_alive:
        return []
    zygote = psutil.Process(pool._zygote._process.pid)
    return [zygote, *zygote.children()]


_helpers_of_others: set[int] = set()
"""Process ids: engines of other tests may be running in this process."""


def helpers() -> list[psutil.Process]:
    """Of the pool under test."""
    return [process for process in all_helpers() if process.pid not in _helpers_of_others]


def is_busy(process: psutil.Process) -> bool:
    """A helper is in a job."""
    with contextlib.suppress(psutil.Error):
        return process.cpu_times().user > 0.2
    return False


def all_helpers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "radixrt.constrained" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.Error:
            continue
    return found


async def refusal(pool: CompilePool, constraint: Constraint) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await pool.compile(constraint)
    return caught.value


def test_what_comes_back_is_what_compiling_here_gives(with_shared_pool: Callable[..., Any]) -> None:
    specs: list[Constraint] = [
        JsonSchema(schema='{"type":"object","properties":{"b":{},"a":{}},"required":["b","a"]}'),
        AnyJson(),
        Regex(pattern="[a-z]+@[a-z]+"),
        Choice(options=("yes", "no", "é?")),
        Ebnf(grammar='root ::= "(" root? ")"'),
    ]

    async def body(pool: CompilePool) -> None:
        facts = facts_of(KIND)
        results = await asyncio.gather(*map(pool.compile, specs))
        for constraint, result in zip(specs, results, strict=True):
            assert result == compile_constraint(constraint, facts, CompileOptions())
        balanced = load_grammar(results[-1].grammar, facts)
        assert accepts(balanced, facts, "((()))") and not accepts(balanced, facts, "(()")

    with_shared_pool(body)


def test_equal_constraints_are_compiled_once(with_shared_pool: Callable[..., Any]) -> None:
    constraint = Regex(pattern="[0-9]{4}-[0-9]{2}")

    async def body(pool: CompilePool) -> None:
        hits, known = pool.compiled.hits, len(pool.compiled)
        results = await asyncio.gather(*(pool.compile(constraint) for _ in range(20)))
        assert all(result is results[0] for result in results)
        assert await pool.compile(Regex(pattern="[0-9]{4}-[0-9]{2}")) is results[0]
        assert (pool.compiled.hits, len(pool.compiled)) == (hits + 1, known + 1)

    with_shared_pool(body)


def test_one_that_gives_up_leaves_the_others_waiting(with_shared_pool: Callable[..., Any]) -> None:
    async def body(pool: CompilePool) -> None:
        first = asyncio.create_task(pool.compile(Regex(pattern="abc")))
        second = asyncio.create_task(pool.compile(Regex(pattern="abc")))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).grammar.source
        with pytest.raises(asyncio.CancelledError):
            await first

    with_shared_pool(body)


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    cache: ByteLru[str, str] = ByteLru(10, max_entries=3)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 4)
    assert cache.get("b") is None and cache.get("a") == "A" and cache.get("c") == "C"
    cache.put("a", "A2", 6)
    assert cache.get("a") == "A2" and cache.used_bytes == 10
    cache.put("large", "L", 11)
    assert cache.get("large") is None and len(cache) == 2
    cache.put("d", "D", 0)
    cache.put("e", "E", 0)
    assert cache.get("c") is None and len(cache) == 3 and cache.used_bytes == 6


def test_the_memory_of_a_compiled_grammar_counts_all_its_objects() -> None:
    schema = {
        "type": "object",
        "properties": {f"k{n}": {"type": "string", "maxLength": 1000 + n} for n in range(20)},
    }
    check = SpanCheck(path=("a", None), schema=schema, pointer="/properties/a", keywords=("not",))
    made = Compiled(
        grammar=Grammar.compiled("llguidance", json.dumps(schema).encode()),
        checks=(check,),
        validator=schema,
    )
    packed = msgspec.msgpack.encode(made)
    decode = msgspec.msgpack.Decoder(Compiled).decode
    tracemalloc.start()
    try:
        kept = [decode(packed) for _ in range(50)]
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sum(map(memory_of, kept))
    assert used < counted < 2 * used


def test_what_can_not_be_enforced_is_an_error_of_the_request(
    with_shared_pool: Callable[..., Any],
) -> None:
    async def body(pool: CompilePool) -> None:
        killed = pool.killed
        for constraint in (Regex(pattern="("), JsonSchema(schema="{"), Choice(options=())):
            error = await refusal(pool, constraint)
            assert error.status == 400 and error.param == "structured"
        assert pool.killed == killed

    with_shared_pool(body)


def test_answers_are_validated_with_formats_and_nothing_is_fetched(
    with_shared_pool: Callable[..., Any],
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "day": {"format": "date"}},
        "uniqueItems": True,
    }

    async def body(pool: CompilePool) -> None:
        assert await pool.validate(schema, '{"a": 1, "day": "2024-02-29"}') == []
        (wrong,) = await pool.validate(schema, '{"a": "x"}')
        assert wrong.path == ("a",) and "integer" in wrong.message
        assert await pool.validate(schema, '{"day": "2023-02-29"}')
        assert await pool.validate(schema, '{"a": 1')
        assert await pool.validate({}, "NaN")
        assert await pool.validate({"maximum": 10**30}, str(10**30)) == []
        assert await pool.validate({}, "[" * 100_000)
        with pytest.raises(RequestError, match="could not be handled"):
            await pool.validate({"$ref": "http://127.0.0.1:9/x"}, "1")
        assert await pool.validate({"type": "null"}, "null") == []

    with_shared_pool(body)


DEEP = 20_000


def exponential(depth: int) -> dict[str, Any]:
    """2 ** depth branches, if references are written out."""
    definitions: dict[str, Any] = {
        f"d{i}": {
            "anyOf": [
                {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}},
                {"type": "object", "properties": {"b": {"$ref": f"#/$defs/d{i + 1}"}}},
            ]
        }
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def chain_of_rules(count: int) -> str:
    """A grammar whose compiled form grows with the square of the number of rules."""
    rules = [f'r{index} ::= "{index}" r{index + 1}' for index in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "end"'])


HOSTILE: dict[str, Callable[[], Constraint]] = {
    "deep": lambda: JsonSchema(schema='{"items":' * DEEP + "{}" + "}" * DEEP),
    "exponential": lambda: JsonSchema(schema=json.dumps(exponential(40))),
    "loop": lambda: JsonSchema(schema='{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "remote": lambda: JsonSchema(schema='{"$ref":"http://127.0.0.1:9/schema.json"}'),
    "huge enum": lambda: JsonSchema(schema=json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    "huge choice": lambda: Choice(options=tuple(f"choice {i}" for i in range(100_000))),
    "10 MB": lambda: JsonSchema(
        schema=json.dumps({"properties": {f"p{i}": {"const": "x" * 90} for i in range(90_000)}})
    ),
    "40 MB": lambda: JsonSchema(schema=json.dumps({"const": "x" * 40_000_000})),
    "repeats": lambda: Regex(pattern="(a{0,100000}b){0,100000}"),
    "nested quantifiers": lambda: Regex(pattern="((((a+)+)+)+)+b"),
    "counters": lambda: Regex(pattern=".*a.{3000}"),
    "intersections": lambda: JsonSchema(
        schema=json.dumps({"allOf": [{"pattern": f"^.*{c}.{{0,50}}$"} for c in "abcdefgh"]})
    ),
    "unicode": lambda: Regex(pattern="\\w{5000}\\p{L}{5000}"),
    "ebnf repeats": lambda: Ebnf(grammar='root ::= ("a"{0,100000}){0,100000}'),
    "ebnf nesting": lambda: Ebnf(grammar="root ::= " + "(" * DEEP + '"a"' + ")" * DEEP),
    "ebnf chain of rules": lambda: Ebnf(grammar=chain_of_rules(20_000)),
    "ebnf left recursion": lambda: Ebnf(grammar="root ::= root root | root"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_constraints_end_in_bounded_time_and_others_go_on(
    with_strict_pool: Callable[..., Any], name: str
) -> None:
    """Compiled or refused; whichever, it is over by the time limit, and quick ones are served
    meanwhile."""
    constraint = HOSTILE[name]()

    async def body(pool: CompilePool) -> None:
        await pool.compile(Regex(pattern=f"before {name}"))
        peak = 0

        async def watch() -> None:
            nonlocal peak
            while True:
                for helper in helpers():
                    try:
                        peak = max(peak, helper.memory_info().rss)
                    except psutil.Error:
                        continue
                await asyncio.sleep(0.05)

        watcher = asyncio.create_task(watch())
        hostile = asyncio.create_task(pool.compile(constraint))
        for i in range(5):
            assert (await pool.compile(Regex(pattern=f"quick{i} {name}"))).grammar.source
        try:
            await hostile
        except RequestError as error:
            assert error.status == 400 and len(error.message) < 1000
        watcher.cancel()
        assert peak < 2 << 30
        assert (await pool.compile(Regex(pattern=f"after {name}"))).grammar.source

    with_strict_pool(body)


def test_a_catastrophic_pattern_is_stopped_and_the_helper_replaced(
    with_pool: Callable[..., Any],
) -> None:
    async def body(pool: CompilePool) -> None:
        with pytest.raises(RequestError, match="more than 2 seconds"):
            await pool.validate(SLOW_PATTERN, SLOW_TEXT)
        assert pool.killed == 1
        assert await pool.validate(SLOW_PATTERN, '"Aa"') != []

    with_pool(body, time_limit_s=2.0, patience_s=0.2)


def test_the_error_at_the_time_limit_names_the_slow_subschema(
    with_strict_pool: Callable[..., Any],
) -> None:
    slow, easy = json.loads(_slow_schema(0)), {"type": "string"}
    schema = {"properties": {"easy": easy, "a/b": {"type": "array", "items": slow}, "z": easy}}

    async def body(pool: CompilePool) -> None:
        with pytest.raises(RequestError, match="more than 2 seconds; at '/properties/a~1b/items'"):
            await pool.compile(JsonSchema(schema=json.dumps(schema)))
        with pytest.raises(RequestError, match="more than 2 seconds; simplify"):
            await pool.validate(SLOW_PATTERN, SLOW_TEXT)

    with_strict_pool(body)


def test_the_tokenizer_is_read_when_a_constraint_needs_it(with_saved_tokens: Path) -> None:
    """A schema is compiled without a tokenizer.json, a regular expression in a helper of which the
    zygote has read it."""
    away = with_saved_tokens.rename(with_saved_tokens.with_suffix(".away"))
    with running_pool(config_of(str(with_saved_tokens))) as in_pool:

        async def compile_all(pool: CompilePool) -> None:
            schema = JsonSchema(schema='{"properties": {"a": {"const": "bc"}}, "required": ["a"]}')
            before = {helper.pid for helper in helpers()}
            by_schema = await pool.compile(schema)
            assert before <= {helper.pid for helper in helpers()}, "none was replaced"
            away.rename(with_saved_tokens)
            for pattern in ("[a-z]+@[a-z]+", "ab?c"):
                compiled = await pool.compile(Regex(pattern=pattern))
                assert compiled == _compiled_here(Regex(pattern=pattern))
                assert compiled.grammar.backend == "fsm"
            assert by_schema == _compiled_here(schema)
            assert pool.killed == 0

        in_pool(compile_all)


def test_a_tokenizer_that_is_gone_fails_the_job_alone(with_saved_tokens: Path) -> None:
    with running_pool(config_of(str(with_saved_tokens))) as in_pool:

        async def compile_all(pool: CompilePool) -> None:
            await pool.compile(AnyJson())
            with_saved_tokens.unlink()
            for _ in range(2):
                refused = await refusal(pool, Regex(pattern="[a-z]+"))
                assert "Can't read the tokenizer" in refused.message
                await pool.compile(JsonSchema(schema='{"type": "integer", "minimum": 9}'))

        in_pool(compile_all)


def test_a_tokenizer_that_cannot_be_loaded_fails_the_jobs_that_need_it_alone(
    with_saved_tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zygote, "load_tokenizer", lambda zygote: zygote._process.kill())
    with running_pool(config_of(str(with_saved_tokens))) as in_pool:

        async def compile_all(pool: CompilePool) -> None:
            refused = await refusal(pool, Regex(pattern="[a-z]+"))
            assert refused.status == 503 and "cannot load the tokenizer" in refused.message
            schema = JsonSchema(schema='{"type": "integer", "minimum": 9}')
            while True:
                try:
                    await pool.compile(schema)
                    break
                except RequestError as error:  # until the other helper has a zygote that lives
                    assert error.status == 503
                    await asyncio.sleep(0.05)

        in_pool(compile_all)


def test_a_pool_closes_while_the_tokenizer_is_loaded(with_saved_tokens: Path) -> None:
    with running_pool(config_of(str(with_saved_tokens))) as in_pool:

        async def load(pool: CompilePool) -> None:
            await pool.compile(AnyJson())
            with_saved_tokens.unlink()
            os.mkfifo(with_saved_tokens)  # it never ends
            needs_it = asyncio.create_task(pool.compile(Regex(pattern="[a-z]+")))
            await asyncio.sleep(0.1)
            await pool.compile(JsonSchema(schema='{"type": "integer", "minimum": 9}'))
            needs_it.cancel()

        in_pool(load)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10


def _compiled_here(constraint: Constraint) -> Compiled:
    return compile_constraint(constraint, facts_of(KIND), CompileOptions())


def test_the_error_after_deaths_of_helpers_names_the_subschema(
    with_pool: Callable[..., Any],
) -> None:
    schema = {"properties": {"easy": {"type": "null"}, "a/b": json.loads(_slow_schema(1))}}

    async def body(pool: CompilePool) -> None:
        compiling = asyncio.create_task(pool.compile(JsonSchema(schema=json.dumps(schema))))
        while not compiling.done():
            await asyncio.wait([compiling], timeout=0.05)
            for helper in helpers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if helper.ppid() != os.getpid() and is_busy(helper):  # not the zygote
                        helper.kill()
        with pytest.raises(
            RequestError, match=r"did not survive .*SIGKILL\); at '/properties/a~1b'"
        ):
            await compiling

    with_pool(body, time_limit_s=50.0)


def test_quick_jobs_overtake_any_number_of_slow_ones(with_pool: Callable[..., Any]) -> None:
    """Four jobs of 1.5 seconds on two helpers would take three; quick ones wait for none of them to
    end."""

    async def body(pool: CompilePool) -> None:
        await pool.compile(AnyJson())
        slow = [
            asyncio.create_task(pool.validate(SLOW_PATTERN, json.dumps("a" * (200 + i))))
            for i in range(4)
        ]
        await asyncio.sleep(0.5)
        for i in range(3):
            await pool.compile(Regex(pattern=f"quick{i}"))
        assert not all(task.done() for task in slow)
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(result, RequestError) for result in results)

    with_pool(body, time_limit_s=1.5, patience_s=0.2)


def test_too_many_jobs_are_refused(with_pool: Callable[..., Any]) -> None:
    async def body(pool: CompilePool) -> None:
        results = await asyncio.gather(
            *(pool.compile(Regex(pattern=f"a{i}")) for i in range(10)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, RequestError)]
        assert len(refused) == 6 and all(r.status == 503 and r.retry_after_s for r in refused)

    with_pool(body, max_waiting=4)


def test_tenants_take_turns_at_the_helpers(with_shared_pool: Callable[..., Any]) -> None:
    """One job of a tenant waits for one or two of another's thirty, not for all."""

    async def body(pool: CompilePool) -> None:
        ended: list[str] = []

        async def compile(tenant: str, pattern: str) -> None:
            await pool.compile(Regex(pattern=pattern), tenant)
            ended.append(tenant)

        many = [compile("many", f"many{i}") for i in range(30)]
        await asyncio.gather(*many, compile("few", "few"))
        assert ended.index("few") <= 2 * pool.config.num_helpers

    with_shared_pool(body)


def test_a_full_queue_has_room_for_a_tenant_with_fewer_jobs(with_pool: Callable[..., Any]) -> None:
    async def body(pool: CompilePool) -> None:
        def compile(tenant: str, count: int) -> list[asyncio.Task[Any]]:
            jobs = [Regex(pattern=f"{tenant}{i}") for i in range(count)]
            return [asyncio.create_task(pool.compile(job, tenant)) for job in jobs]

        many = compile("many", 4)
        await asyncio.sleep(0)
        few = compile("few", 2)
        results = await asyncio.gather(*many, *few, return_exceptions=True)
        refused = [i for i, each in enumerate(results) if isinstance(each, RequestError)]
        assert refused == [2, 3] and results[3].status == 503 and results[3].retry_after_s
        counts = [str(results[index]).split(" of your")[0] for index in refused]
        assert counts == ["3", "4"], "each error counts the jobs of the tenant that gets it"

    with_pool(body, max_waiting=4)


def test_a_helper_that_is_killed_from_outside_is_replaced(with_pool: Callable[..., Any]) -> None:
    async def body(pool: CompilePool) -> None:
        while len(starting := helpers()) < 2:  # killed while they start, ...
            await asyncio.sleep(0.01)
        for helper in starting:
            helper.send_signal(signal.SIGKILL)
        await pool.compile(AnyJson())
        for helper in helpers():  # ... and when they have
            helper.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.3)
        results = await asyncio.gather(*(pool.compile(Regex(pattern=f"b{i}")) for i in range(4)))
        assert all(result.grammar.source for result in results)

    with_pool(body)


def test_a_new_helper_is_a_fork_of_a_process_with_everything_loaded(
    with_pool: Callable[..., Any],
) -> None:
    async def body(pool: CompilePool) -> None:
        await pool.compile(AnyJson())
        before = helpers()
        parents = [process for process in before if process.children()]
        assert len(before) == 3 and len(parents) == 1
        assert parents[0].num_threads() == 1, "only then forking is safe"
        for helper in parents[0].children():
            helper.kill()
        for schema in ('{"type": "object"}', '{"type": "array", "uniqueItems": true}'):
            await pool.compile(JsonSchema(schema=schema))
        after = parents[0].children()
        assert {process.pid for process in after}.isdisjoint(process.pid for process in before)
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in after)
        loading_s = sum(parents[0].cpu_times()[:2])
        assert cpu_s < loading_s / 2, "a fork loads nothing again"
        for process in after:
            open_files = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
            sockets = {name for name in open_files if name.startswith("socket:")}
            assert len(sockets) == 1, "it holds its own socket, not that of its zygote"

    with_pool(body)


def test_memory_is_limited_also_while_a_library_works(with_pool: Callable[..., Any]) -> None:
    """Validating makes a list that needs more than the limit."""

    async def body(pool: CompilePool) -> None:
        with pytest.raises(RequestError, match="answer takes more memory than it may; simplify"):
            await pool.validate({}, "[" + "[],[[]]," * 3_000_000 + "1]")
        assert await pool.validate({}, "[1]") == []

    with_pool(body, memory_limit_bytes=128 << 20)


def test_a_tokenizer_that_can_not_be_read_makes_the_pool_say_so(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")

    async def main() -> None:
        pool = CompilePool(config_of(str(path)))
        pool.start()
        error = await asyncio.wait_for(refusal(pool, AnyJson()), timeout=60)
        assert str(path) in error.message
        assert (await refusal(pool, AnyJson())).status == 503
        await pool.close()

    asyncio.run(main())


def test_a_busy_helper_dies_with_its_parent(tokenizer_json: str) -> None:
    code = textwrap.dedent(
        """
        import asyncio, sys, msgspec
        from radixrt.constrained.compiler.jobs import PoolConfig
        from radixrt.constrained.compiler.pool import CompilePool
        async def main():
            pool = CompilePool(msgspec.json.decode(sys.argv[1], type=PoolConfig))
            pool.start()
            jobs = [asyncio.create_task(pool.validate({"pattern": "^(([a-z])+.)+[A-Z]$"}, '"' + "a" * 300 + '"')) for _ in range(2)]
            await asyncio.gather(*jobs)
        asyncio.run(main())
        """
    )
    import msgspec

    config = config_of(tokenizer_json, time_limit_s=100.0, patience_s=100.0)
    command = [sys.executable, "-c", code, msgspec.json.encode(config)]
    parent = start(command, stdout=subprocess.PIPE)
    deadline, busy = time.monotonic() + 60, 0
    while busy < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        zygotes = psutil.Process(parent.pid).children()
        children = psutil.Process(parent.pid).children(recursive=True)
        busy = sum(is_busy(child) for child in children if child not in zygotes)
    assert len(children) == 3, "the zygote and two helpers"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    end(parent)
    assert not alive


def test_compiles_of_clients_that_have_gone_hold_up_nobody(
    with_shared_pool: Callable[..., Any],
) -> None:
    async def body(pool: CompilePool) -> None:
        abandoned = [
            asyncio.create_task(pool.compile(JsonSchema(schema=_slow_schema(i)))) for i in range(30)
        ]
        await asyncio.sleep(0.1)
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        await pool.compile(JsonSchema(schema='{"type": "integer", "minimum": 8}'))
        waiting = len(pool._quick) + len(pool._slow)
        assert waiting == 0, "what nobody waits for is still in the queue"

    with_shared_pool(body)


def test_a_job_that_nobody_waits_for_costs_no_helper_while_there_is_patience(
    with_pool: Callable[..., Any],
) -> None:
    async def body(pool: CompilePool) -> None:
        await pool.compile(AnyJson())
        gone = [
            asyncio.create_task(pool.compile(JsonSchema(schema=_slow_schema(i, size=60))))
            for i in range(2)
        ]
        await asyncio.sleep(0.1)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await pool.compile(JsonSchema(schema='{"type": "integer"}'))
        assert pool.killed == 0

    with_pool(body, patience_s=60.0, time_limit_s=60.0)


def _slow_schema(number: int, size: int = 300) -> str:
    """A ring of requirements: of 60 it takes a second or more to be rewritten, of 300 more than
    anybody waits."""
    names = [f"p{number}_{i}" for i in range(size)]
    ring = {name: [names[(i + 1) % size]] for i, name in enumerate(names)}
    return json.dumps({"type": "object", "dependentRequired": ring})


def test_a_helper_that_was_killed_is_not_the_users_fault(with_pool: Callable[..., Any]) -> None:
    async def body(pool: CompilePool) -> None:
        await pool.compile(JsonSchema(schema='{"type": "null"}'))
        for helper in helpers():
            helper.kill()
        compiled = await pool.compile(JsonSchema(schema='{"type": "boolean"}'))
        assert compiled.grammar.backend == "llguidance"

    with_pool(body)


@pytest.mark.parametrize(
    "constraint", [Choice(options=("x" * 4_000_000,)), Regex(pattern="(abcd){1000000}")]
)
def test_what_would_hold_up_the_worker_is_refused(
    with_shared_pool: Callable[..., Any], constraint: Any
) -> None:
    async def body(pool: CompilePool) -> None:
        with pytest.raises(RequestError) as error:
            await pool.compile(constraint)
        assert error.value.status == 400

    with_shared_pool(body)
