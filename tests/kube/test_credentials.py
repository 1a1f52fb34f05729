"""Tests the renewal of tokens and of exec plugins' credentials. Secrets must not be logged."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podgpu.errors import SourceError
from podgpu.kube.client import Credentials, run_plugin
from podgpu.kube.config import ApiConfig, ExecPlugin, ExecVariable
from tests.nodes.clock import FakeClock, wait_until

V1 = "client.authentication.k8s.io/v1"


def token_of(credentials: Credentials) -> str:
    return asyncio.run(credentials.current())[0]


def from_file(path: Path, clock: FakeClock, token: str = "") -> Credentials:
    return Credentials(
        ApiConfig("http://127.0.0.1", "the test", token=token, token_file=str(path)), clock.wall
    )


def test_a_token_file_is_read_again_after_a_minute(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", FakeClock()
    file.write_text("one\n")
    credentials = from_file(file, clock)
    assert token_of(credentials) == "one"
    file.write_text("two")
    clock.advance(59)
    assert token_of(credentials) == "one"
    clock.advance(1)
    assert token_of(credentials) == "two"
    file.write_text("three")
    clock.advance(-3600)
    assert token_of(credentials) == "three", (
        "the token must be renewed although the system clock was set back"
    )


def test_an_empty_token_file_is_no_login_without_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("\n")
    with pytest.raises(SourceError, match="there is no usable token in"):
        token_of(from_file(file, FakeClock()))


def test_the_last_token_is_kept_while_the_file_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "token", FakeClock()
    file.write_text("one-secret")
    credentials = from_file(file, clock)
    assert token_of(credentials) == "one-secret"
    file.unlink()
    clock.advance(61)
    assert token_of(credentials) == "one-secret"
    assert "cannot read the token" in caplog.text
    assert "one-secret" not in caplog.text


def plugin(tmp_path: Path, code: str, **options: Any) -> ExecPlugin:
    script = tmp_path / "plugin.py"
    script.write_text(code)
    return ExecPlugin(sys.executable, V1, ("-S", str(script)), **options)


def printing(status: str, count: Path | None = None) -> str:
    counting = f"open({str(count)!r}, 'a').write('x')\n" if count else ""
    answer = f"{{'apiVersion': {V1!r}, 'kind': 'ExecCredential', 'status': {status}}}"
    return f"{counting}import json, os\nprint(json.dumps({answer}))"


def run(made: ExecPlugin, seconds: float = 60.0) -> Any:
    return asyncio.run(run_plugin(made, seconds))


def test_a_plugin_gives_a_token_or_a_certificate(tmp_path: Path) -> None:
    assert run(plugin(tmp_path, printing("{'token': 'made'}"))).token == "made"
    both = run(plugin(tmp_path, printing("{'clientCertificateData': 'C', 'clientKeyData': 'K'}")))
    assert (both.certificate, both.key, both.token) == ("C", "K", None)
    assert "'C'" not in repr(both)


def test_a_plugin_gets_its_variables_and_no_terminal(tmp_path: Path) -> None:
    written = tmp_path / "written"
    code = (
        f"import os, sys\nopen({str(written)!r}, 'w').write(os.environ['KUBERNETES_EXEC_INFO'])\n"
    )
    code += printing("{'token': os.environ['PROFILE'] + repr(len(os.read(0, 9)))}")
    variables = (ExecVariable("PROFILE", "ops"), ExecVariable("EMPTY"))
    made = run(plugin(tmp_path, code, env=variables))
    assert made.token == "ops0"
    assert json.loads(written.read_text()) == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }


def noting(written: Path, status: str = "{'token': 't'}") -> str:
    """Code that writes whether the plugin may use the terminal."""
    note = f"import os\nopen({str(written)!r}, 'a').write(os.environ['KUBERNETES_EXEC_INFO'] + '\\n')\n"
    return note + printing(status)


def list_interactive(written: Path) -> list[bool]:
    lines = written.read_text().splitlines()
    written.unlink()
    return [json.loads(line)["spec"]["interactive"] for line in lines]


@pytest.mark.parametrize(
    ("mode", "is_interactive"), [(None, True), ("IfAvailable", True), ("Never", False)]
)
def test_a_plugin_may_use_the_terminal_of_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, is_interactive: bool
) -> None:
    written = tmp_path / "written"
    made = plugin(tmp_path, noting(written), interactive_mode=mode)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    asyncio.run(run_plugin(made, is_attended=True))
    assert list_interactive(written) == [is_interactive]
    asyncio.run(run_plugin(made, is_attended=False))
    assert list_interactive(written) == [False]

    for stdin in (None, SimpleNamespace(isatty=lambda: False)):
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(run_plugin(made, is_attended=True))
        assert list_interactive(written) == [False]
        always = plugin(tmp_path, noting(written), interactive_mode="Always")
        with pytest.raises(SourceError, match="needs a terminal"):
            asyncio.run(run_plugin(always, is_attended=True))


def test_only_the_first_login_uses_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, `podgpu top` may draw on it."""
    written, clock = tmp_path / "written", FakeClock()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    status = "{'token': 't', 'expirationTimestamp': '2001-01-01T00:00:00Z'}"
    config = ApiConfig(
        "http://127.0.0.1", "the test", plugin=plugin(tmp_path, noting(written, status))
    )
    credentials = Credentials(config, clock.wall, is_attended=True)
    assert token_of(credentials) == "t"
    credentials.invalidate()
    assert token_of(credentials) == "t"
    assert list_interactive(written) == [True, False]


def test_a_plugin_runs_until_shortly_before_its_credential_expires(tmp_path: Path) -> None:
    count, clock = tmp_path / "count", FakeClock()
    clock.advance(1_893_456_000.0 - 600 - clock.wall())  # ten minutes before the year 2030
    made = plugin(
        tmp_path, printing("{'token': 't', 'expirationTimestamp': '2030-01-01T00:00:00Z'}", count)
    )
    credentials = Credentials(ApiConfig("http://127.0.0.1", "the test", plugin=made), clock.wall)
    for seconds, runs in ((0, 1), (539, 1), (2, 2), (0, 2), (29, 2), (1, 3)):
        clock.advance(seconds)
        assert token_of(credentials) == "t"
        assert len(count.read_text()) == runs
    credentials.invalidate()
    token_of(credentials)
    assert len(count.read_text()) == 4


def test_a_credential_that_does_not_expire_is_kept(tmp_path: Path) -> None:
    count, clock = tmp_path / "count", FakeClock()
    made = plugin(tmp_path, printing("{'token': 't'}", count))
    credentials = Credentials(ApiConfig("http://127.0.0.1", "the test", plugin=made), clock.wall)
    for seconds in (0, 61, 86_400):
        clock.advance(seconds)
        assert token_of(credentials) == "t"
    assert count.read_text() == "x"


def test_a_token_of_the_kubeconfig_counts_more_than_a_plugin(tmp_path: Path) -> None:
    count = tmp_path / "count"
    made = plugin(tmp_path, printing("{'token': 'made'}", count))
    file = tmp_path / "token"
    file.write_text("read")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"token": "given"}, "given"),
        ({"token_file": str(file)}, "read"),
    ]
    for options, token in cases:
        config = ApiConfig("http://127.0.0.1", "the test", plugin=made, **options)
        assert token_of(Credentials(config)) == token
    assert not count.exists()


def test_a_plugin_that_is_not_installed() -> None:
    for hint, text in (("get it\n from x", "get it from x"), ("", "install it, or put its full")):
        made = ExecPlugin("/nothing", V1, install_hint=hint)
        with pytest.raises(SourceError, match=text) as caught:
            run(made)
        assert "cannot be run (No such file or directory)" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys\nprint('secret')\nprint('first\\nlast', file=sys.stderr)\nsys.exit(3)",
            "code 3: last",
        ),
        ("import sys\nsys.stderr.write('x' * 100000 + '\\nend')\nsys.exit(1)", "code 1: end"),
        ("print('secret')", "is not an ExecCredential in JSON"),
        ('print(\'{"apiVersion": "v0", "status": {"token": "t"}}\')', "must have the API version"),
        (printing("{'clientKeyData': 'secret'}"), "a token or a certificate"),
        (printing("{'token': 'my secret'}"), "is empty or contains spaces"),
        (printing("{'token': 'a', 'clientKeyData': 'secret'}"), "a certificate with its key"),
        (
            printing("{'token': 'secret', 'expirationTimestamp': 'soon'}"),
            "is not an ExecCredential",
        ),
    ],
)
def test_a_plugin_that_fails(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        run(plugin(tmp_path, code))
    assert caught.value.reason == "exec_plugin"
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.reads_host("whether a process has ended only /proc tells")
def test_a_plugin_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    made = ExecPlugin("/bin/sh", V1, ("-c", f"sleep 600 & echo $! > {pid}; echo waiting >&2; wait"))
    with pytest.raises(SourceError, match="did not end within 1 s and was killed"):
        run(made, seconds=1.0)
    wait_until(lambda: _is_gone(int(pid.read_text())), "the child is gone")
