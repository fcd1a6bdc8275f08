"""How many files a service may open."""

import resource

from sbx.api.server.serve import FILES_MAX
from sbx.linux.descriptors import raise_nofile_limit


def test_a_service_may_open_as_many_files_as_the_host_lets_it() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        assert raise_nofile_limit(FILES_MAX) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
