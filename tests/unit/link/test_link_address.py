import pytest

from slurmbridge.link.address import UNIX_CHARS, Address, check_security, parse_address
from slurmbridge.pool.errors import ConfigError, ParseError

GOOD = {
    "bridge.ns.svc:7443": (Address("bridge.ns.svc", 7443), "dns:///bridge.ns.svc:7443", False),
    "dns:///bridge.ns.svc:7443": (
        Address("bridge.ns.svc", 7443),
        "dns:///bridge.ns.svc:7443",
        False,
    ),
    "192.0.2.7:7443": (Address("192.0.2.7", 7443), "ipv4:192.0.2.7:7443", False),
    "[2001:db8::7]:7443": (Address("2001:db8::7", 7443), "ipv6:[2001:db8::7]:7443", False),
    "127.0.0.3:0": (Address("127.0.0.3", 0), "ipv4:127.0.0.3:0", True),
    "[::1]:1": (Address("::1", 1), "ipv6:[::1]:1", True),
    "localhost:65535": (Address("localhost", 65535), "dns:///localhost:65535", True),
    "unix:/run/b/link.sock": (Address(path="/run/b/link.sock"), "unix:/run/b/link.sock", True),
    "unix:///run/b/link.sock": (Address(path="/run/b/link.sock"), "unix:/run/b/link.sock", True),
    "0.0.0.0:7443": (Address("0.0.0.0", 7443), "ipv4:0.0.0.0:7443", False),
}


@pytest.mark.parametrize(("text", "expected"), GOOD.items(), ids=GOOD.keys())
def test_an_address_is_read(text, expected):
    address = parse_address(text)
    assert (address, address.target, address.is_this_host) == expected
    assert parse_address(str(address)) == address


BAD = [
    "", "bridge", "bridge:", ":7443", "bridge:65536", "bridge:x", "bridge:-1", "a b:1", "-a:1",
    "::1:7443", "[::1]", "[bridge]:1", "[127.0.0.1]:1", "unix:run/x", "unix:", "unix:/a\0b",
    "unix:/" + "x" * UNIX_CHARS, "xds:///a:1", "http://a:1", "a..b:1", "a:1\n", "é:1", "a/b:1",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused(text):
    with pytest.raises(ParseError):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/x"])
def test_plain_text_is_allowed_on_this_host(text):
    check_security(parse_address(text), has_tls=False, insecure=False, path="$.x")


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "bridge:1", "localhost.evil:1"]
)
def test_plain_text_over_a_network_must_be_asked_for(text):
    address = parse_address(text)
    with pytest.raises(ConfigError, match=r"\$\.x: .*insecure"):
        check_security(address, has_tls=False, insecure=False, path="$.x")
    check_security(address, has_tls=False, insecure=True, path="$.x")
    check_security(address, has_tls=True, insecure=False, path="$.x")


def test_insecure_and_tls_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude"):
        check_security(parse_address("a:1"), has_tls=True, insecure=True, path="$.x")
