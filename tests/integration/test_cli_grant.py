"""`sbx grant` against a service as it is started by hand."""

import json
from collections.abc import Iterator

import pytest
from serving import Service, open_directory, service
from web import Web, granting

pytestmark = pytest.mark.needs("namespaces")


@pytest.fixture(scope="module")
def served(site: Web) -> Iterator[Service]:
    with open_directory() as top:
        policies = top / "policies"
        policies.mkdir()
        (policies / "granting.toml").write_text(granting(site))
        with service("--policies", policies, top=top) as served:
            yield served


def test_access_is_granted_listed_and_revoked(served: Service, site: Web) -> None:
    made = served.quick("create", "--policy", "granting")
    assert made.returncode == 0, made.stderr
    box = made.stdout.strip()
    code = f"import urllib.request; print(urllib.request.urlopen('{site.url}/a').read())"
    assert "nothing is granted" in served.quick("grant", "list", box).stderr
    assert "refused by network.allow" in served.quick("exec", box, "-c", code).stderr

    granted = served.quick("grant", "add", box, "network", site.host, "--for", "hour")
    assert granted.returncode == 0, granted.stderr
    grant = granted.stdout.strip()
    assert served.quick("exec", box, "-c", code).stdout == "b'hello from /a'\n"
    (row,) = json.loads(served.quick("grant", "list", box, "--json").stdout)["grants"]
    assert (row["id"], row["target"], row["duration"]) == (grant, site.host, "hour")
    assert site.host in served.quick("grant", "list", box).stdout
    assert (
        "nothing is granted" in served.quick("grant", "list", box, "--conversation", "other").stderr
    )

    assert served.quick("grant", "revoke", box, grant).returncode == 0
    assert "refused by network.allow" in served.quick("exec", box, "-c", code).stderr
    again = served.quick("grant", "revoke", box, grant)
    assert (again.returncode, "does not exist" in again.stderr) == (2, True)


def test_what_the_policy_does_not_permit_is_refused(served: Service, site: Web) -> None:
    box = served.quick("create", "--policy", "granting").stdout.strip()
    for words in (("network", "example.org:443"), ("network", site.host, "--for", "conversation")):
        refused = served.quick("grant", "add", box, *words)
        assert refused.returncode == 3, refused.stderr
        assert "permit" in refused.stderr
    assert served.quick("grant", "add", box, "everything", "x").returncode == 2
