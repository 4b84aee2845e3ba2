import io
import json
import logging
import warnings

import msgspec
import pytest
import structlog

from slurmbridge import log


@pytest.fixture
def out():
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.BytesIO()
    yield stream
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_time_level_logger_event_and_fields(out):
    log.configure("info", out, component="extender")
    log.get_logger("slurmbridge.link").info("view received", generation=7)
    (line,) = lines(out)
    assert line.pop("ts").endswith("Z")
    assert line == {
        "component": "extender",
        "level": "info",
        "logger": "slurmbridge.link",
        "event": "view received",
        "generation": 7,
    }


def test_the_cause_is_on_every_line_inside_its_scope_and_gone_after_it(out):
    log.configure("info", out)
    logger = log.get_logger("x")
    with log.cause_scope("pod-1/3", pod="team/p"):
        assert log.current_cause() == "pod-1/3"
        with log.cause_scope(""):
            logger.info("inner")
    logger.info("outer")
    inner, outer = lines(out)
    assert (inner["cause"], inner["pod"]) == ("pod-1/3", "team/p")
    assert "cause" not in outer
    assert log.current_cause() == ""


SECRETS = {
    "a field named token": {"token": "s3cr3t-value"},
    "a header name that ends with token": {"X-SLURM-USER-TOKEN": "s3cr3t-value"},
    "authorization in nested headers": {"headers": {"Authorization": "s3cr3t-value"}},
    "a password in a list of mappings": {"users": [{"db_password": "s3cr3t-value"}]},
    "a bearer token inside a text": {"text": "sent Authorization: Bearer s3cr3t-value to it"},
    "an assignment inside a text": {"text": "SLURM_JWT=s3cr3t-value scontrol show"},
    "a JSON text with a password": {"text": '{"password": "s3cr3t-value"}'},
    "a JWT anywhere": {"text": "got eyJhbGciOiJIUzI1.s3cr3t-value.c2lnbmF0dXJl back"},
    "the repr of an unknown object": {
        "thing": type("T", (), {"__repr__": lambda _: "token=s3cr3t-value"})()
    },
}


@pytest.mark.parametrize("fields", SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_is_never_printed(out, fields):
    log.configure("info", out)
    log.get_logger("x").info("asked", **fields)
    assert b"s3cr3t" not in out.getvalue()
    assert log.REDACTED.encode() in out.getvalue()


def test_a_secret_in_a_struct_and_in_a_traceback_is_never_printed(out):
    class Login(msgspec.Struct):
        user: str
        password: str

    log.configure("info", out)
    try:
        int("Bearer s3cr3t-value")
    except ValueError:
        log.get_logger("x").exception("login failed", login=Login("anna", "s3cr3t-value"))
    (line,) = lines(out)
    assert "s3cr3t" not in json.dumps(line)
    assert line["login"] == {"user": "anna", "password": log.REDACTED}
    assert "ValueError: invalid literal" in line["exception"]


def test_ordinary_fields_with_similar_names_are_kept(out):
    log.configure("info", out)
    log.get_logger("x").info(
        "read",
        token_file="/etc/t",
        tokens_left=3,
        path="/secret-santa",
        token="",
        text="priority/basic plugin",
    )
    (line,) = lines(out)
    assert line["token_file"] == "/etc/t"
    assert line["tokens_left"] == 3
    assert line["path"] == "/secret-santa"
    assert line["token"] == ""
    assert line["text"] == "priority/basic plugin"


def test_lines_below_the_level_are_left_out_and_a_reload_changes_it(out):
    log.configure("warning", out)
    logger = log.get_logger("x")
    logger.info("one")
    log.configure("debug", out)
    logger.debug("two")
    assert [line["event"] for line in lines(out)] == ["two"]


def test_stdlib_logging_comes_out_in_the_same_form_once(out):
    log.configure("info", out, component="bridge")
    log.configure("info", out, component="bridge")
    with log.cause_scope("c1"):
        logging.getLogger("aiohttp.server").warning("odd %s", "request token=s3cr3t-value")
    logging.getLogger("aiohttp.server").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old api", UserWarning, stacklevel=1)
    first, second = lines(out)
    assert first["event"] == f"odd request token={log.REDACTED}"
    assert (first["logger"], first["component"], first["cause"]) == (
        "aiohttp.server",
        "bridge",
        "c1",
    )
    assert "old api" in second["event"]


def test_logging_never_raises_and_keeps_one_line_per_event(out):
    class Bad:
        def __repr__(self):
            raise ValueError("no")

    loop: dict = {}
    loop["me"] = loop
    log.configure("info", out)
    log.get_logger("x").info(
        "odd\nthings",
        bad=Bad(),
        name="\udcff",
        big=2**80,
        nan=float("nan"),
        loop=loop,
        blob=b"\xff",
        key={1: 2},
    )
    log.get_logger("x").info("long", text="x" * 1_000_000)
    odd, long = lines(out)
    assert odd["event"] == "odd\nthings"
    assert "repr failed" in odd["bad"]
    assert len(long["text"]) < log.TEXT_CHARS + 100
