from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtime.api import ConfigError, EngineConfig
from server import settings as module
from server.settings import Settings, load


def test_defaults_serve_the_embedded_model_with_its_own_heads() -> None:
    settings = load([], {}).resolved()
    assert settings.model_name == "lockstep-tiny"
    assert settings.speculative == "mtp:3"
    assert settings.host == "127.0.0.1"
    assert settings.drain_timeout == 300


def test_a_flag_wins_over_the_environment() -> None:
    environment = {"LOCKSTEP_PORT": "1", "LOCKSTEP_MAX_NUM_SEQS": "7", "LOCKSTEP_API_KEY": "a,b"}
    settings = load(["--port", "2"], environment)
    assert (settings.port, settings.max_num_seqs, settings.api_key) == (2, 7, ("a", "b"))


def test_keys_may_be_repeated() -> None:
    assert load(["--api-key", "a", "--api-key", "b"], {}).api_key == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "x"], "--port"),
        (["--speculative", "mtp"], "--speculative must be none, auto or METHOD:K"),
        (["--speculative", "mtp:8"], "--speculative at most 7"),
        (["--settle-lag", "2"], "--settle-lag"),
        (["--decode-backend", "fast"], "--decode-backend must be 'snapshot' or 'replay'"),
        (["--drain-timeout", "nan"], "--drain-timeout"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_a_bad_value_is_one_sentence_naming_the_flag(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="LOCKSTEP_PORT"):
        load([], {"LOCKSTEP_PORT": "x"})


def test_a_bad_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--api-key", " "], {})
    assert "got" not in str(caught.value)


def test_an_unknown_flag_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--prot", "1"], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert field.description
        assert name == "model_dir" or module.flag_of(name) in text


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


def test_every_engine_setting_can_be_set() -> None:
    config = Settings().resolved().engine_config()
    assert set(EngineConfig.__struct_fields__) <= set(Settings.model_fields)
    assert Path(config.model_dir).is_absolute()
    given = load(["--block-size", "32", "--threads", "3", "--num-slots", "9"], {}).resolved().engine_config()
    assert (given.block_size, given.threads, given.num_slots) == (32, 3, 9)


def test_bad_directories_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Settings(model_dir=str(tmp_path / "no")).resolved()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Settings(model_dir=str(tmp_path)).resolved()
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Settings(model_dir=str(tmp_path)).resolved()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a model configuration"):
        Settings(model_dir=str(tmp_path)).resolved()


@pytest.mark.parametrize(("heads", "expected"), [(1, "mtp:3"), (0, "none"), (None, "none")])
def test_auto_drafts_with_the_model_s_own_heads(tmp_path: Path, heads: int | None, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"mtp_num_hidden_layers": heads}))
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = Settings(model_dir=str(tmp_path)).resolved()
    assert settings.speculative == expected
    assert settings.model_name == tmp_path.name


def test_the_engine_process_finds_the_runtime_and_no_keys() -> None:
    inherited = module.worker_environment({"LOCKSTEP_API_KEY": "secret", "PYTHONPATH": "/x", "HOME": "/root"})
    assert "secret" not in inherited.values()
    assert inherited["HOME"] == "/root"
    assert inherited["OMP_WAIT_POLICY"] == "PASSIVE"
    assert module.worker_environment({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    root = str(Path(module.__file__).parents[1])
    assert inherited["PYTHONPATH"].split(":") == [root, "/x"]


@pytest.mark.parametrize("size", ["", "1"])
def test_a_group_of_one_is_no_group(size: str) -> None:
    assert module.load([], {"WORLD_SIZE": size}) == module.load([], {})


@pytest.mark.parametrize("size", ["0", "2", "many"])
def test_a_group_of_several_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is {size}, but"):
        module.load([], {"WORLD_SIZE": size})
