"""Settings: flags before environment before file, and one sentence for every mistake."""

import inspect
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
import typer.testing

from hybrid_jax.config import EngineConfig
from serving.cli import app
from serving.config import ServerConfig, load_config


def test_a_flag_goes_before_a_variable_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_n: 1\nmax_stop: 2\nmax_num_seqs: 3\nrow_buckets: [4, 8]\n")
    monkeypatch.setenv("HYBRID_JAX_MAX_STOP", "5")
    monkeypatch.setenv("HYBRID_JAX_MAX_NUM_SEQS", "6")
    config = load_config({"max_num_seqs": 7}, file)
    assert (config.max_n, config.max_stop) == (1, 5)
    assert config.engine_options()["max_num_seqs"] == 7
    assert config.engine_options()["row_buckets"] == (4, 8)
    assert load_config({}).max_n == 16


def test_every_field_of_the_engines_config_is_a_setting() -> None:
    config, plain = load_config({}), EngineConfig()
    changed = {"max_queue": 256, "warmup": True}  # what a server wants by default
    for f in fields(EngineConfig):
        assert config.engine_options()[f.name] == changed.get(f.name, getattr(plain, f.name))


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        ({"max_nn": 1}, "", "max_nn"),
        ({}, "max_nn: 1", "max_nn"),
        ({}, "- 1", "holds no settings"),
        ({}, "max_n: [", "holds no settings"),
        ({"max_n": "many"}, "", "max_n: .*'many'"),
        ({"max_n": 0}, "", "max_n must be at least 1, got 0"),
        ({"page_size": 0}, "", "page_size must be at least 1, got 0"),
        ({"dtype": "int3"}, "", "dtype: .*'int3'"),
        ({"tls_cert_file": "a"}, "", "tls_key_file"),
        ({"stall_seconds": 0}, "", "stall_seconds must be positive"),
        ({"http_port": 99_999_999}, "", "http_port must be from 0 to 65535, got 99999999"),
        ({"grpc_port": -1}, "", "grpc_port must be from 0 to 65535, got -1"),
        ({"replicas": 0}, "", "replicas must be at least 1, got 0"),
        ({"replicas": 2, "grpc_port": 0}, "", "over HTTP only; leave grpc_port out"),
        ({"replica_resources": {"GPU": "some"}}, "", "replica_resources.GPU: .*'some'"),
    ],
)
def test_a_mistake_is_one_sentence(
    flags: dict[str, object], text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        load_config(flags, file)
    assert "\n" not in str(caught.value)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_JAX_PORT", "tcp://10.0.0.1:80")  # what Kubernetes' links look like
    with pytest.raises(ValueError, match="HYBRID_JAX_PORT is no setting"):
        load_config({})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no settings file"):
        load_config({}, tmp_path / "none.yaml")


def test_every_setting_is_a_flag_with_help_in_a_group() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in command.params}
    assert set(options) == {*ServerConfig.model_fields, "config"}
    for name, field in ServerConfig.model_fields.items():
        assert field.description, f"{name} has no help"
    groups = {option.rich_help_panel for name, option in options.items() if name != "model"}
    assert groups == {"Model", "Network", "Limits", "Operations", "Replicas", "Engine"}


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Puts the loggers back as they were."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_a_mistake_on_the_command_line_ends_with_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serving import cli

    for arguments, said in (
        (["--max-n", "0"], "max_n must be at least 1"),
        (["--dtype", "int3"], "int3"),
        (["--replica-resources", "GPU"], "name=amount, got 'GPU'"),
        (["no/such/model"], "no/such/model"),
    ):
        monkeypatch.setattr("sys.argv", ["hybrid-jax", "serve", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("hybrid-jax: ") and said in last


def test_every_setting_is_read() -> None:
    """One that nobody reads is a promise that nobody keeps."""
    root = Path(inspect.getfile(ServerConfig)).parent
    text = "\n".join(path.read_text() for path in root.rglob("*.py"))
    own = ServerConfig.model_fields.keys() - {f.name for f in fields(EngineConfig)}
    unread = {n for n in own if f"config.{n}" not in text and f"settings.{n}" not in text}
    assert unread - {"api_key_file"} == set()  # which its method reads
