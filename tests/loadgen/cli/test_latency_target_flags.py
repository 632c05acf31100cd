import argparse

import pytest

from chairlift.service.flags import FlagError
from loadgen.cli.flags import add_flags
from loadgen.cli.latency_target_flags import LATENCY_TARGET_FLAGS, service_mix


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_flags(parser, LATENCY_TARGET_FLAGS)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("flag", ["--target-ttft", "--target-itl"])
def test_a_target_of_nothing_is_refused(flag):
    with pytest.raises(FlagError, match=f"{flag} is 0ms, it must be a duration above 0"):
        parse(flag, "0ms")
    assert service_mix(parse(flag, "5ms")) is not None
