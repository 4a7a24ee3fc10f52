"""The settings: names that agree with their registries, and their aliases."""

import argparse
import logging
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

import pytest

from radixrt.attention.registry import _BACKENDS as ATTENTION_BACKENDS
from radixrt.base.config import ServerConfig
from radixrt.base.settings import setting
from radixrt.base.settings.setting import flag_of
from radixrt.cli.config_flags import add_arguments, config_from_arguments
from radixrt.constrained.grammar import Backend as GrammarBackend
from radixrt.parsers.reasoning import FORMATS as REASONING_FORMATS
from radixrt.parsers.tool_calls.registry import FORMATS as TOOL_CALL_FORMATS
from radixrt.scheduler.queue.waiting_queue import ORDERS
from radixrt.scheduler.radix.eviction import POLICIES
from radixrt.supervisor.launch import prepare


def parse(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_arguments(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("declared", "registered"),
    [
        (setting.AttentionBackendName, {"auto", *ATTENTION_BACKENDS}),
        (setting.EvictionPolicyName, {*POLICIES}),
        (setting.SchedulePolicyName, {*ORDERS}),
        (setting.GrammarBackendName, {"auto", *get_args(GrammarBackend)}),
        (setting.ToolCallParserName, {"auto", "none", *TOOL_CALL_FORMATS}),
        (setting.ReasoningParserName, {"auto", "none", *REASONING_FORMATS}),
    ],
)
def test_a_flag_takes_the_names_of_its_registry(declared: object, registered: set[str]) -> None:
    assert set(get_args(declared)) == registered


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        ("grammar_backend", "outlines", "fsm"),
        ("tool_call_parser", "granite4", "hermes"),
        ("reasoning_parser", "glm45", "qwen3"),
    ],
)
def test_an_alias_of_a_value_is_silent(
    name: str, alias: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert getattr(parse(flag_of(name), alias), name) == value
    assert not caplog.text


@pytest.mark.parametrize("setting", [s for s in fields(ServerConfig) if "aliases" in s.metadata])
def test_an_alias_is_no_name_itself_and_stands_for_one(setting: Field[Any]) -> None:
    names, aliases = (
        get_args(get_type_hints(ServerConfig)[setting.name]),
        setting.metadata["aliases"],
    )
    assert not aliases.keys() & {*names} and {*aliases.values()} <= {*names}


def test_known_names_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse("--page-size", "1", "--debug-disable-cascade").page_size == 1
    assert not caplog.text


def test_further_names_of_the_model_outlive_the_preparation() -> None:
    assert prepare(ServerConfig(served_model_name="one two")).model_names == ["one", "two"]
    assert prepare(ServerConfig()).model_names == ["demo"]
