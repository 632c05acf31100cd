"""The shared table of sampling and stopping parameters against everything that spells them: protos, client, docs."""

import re
from pathlib import Path

import pytest

from chairlift.client.request import GenerationOptions
from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.service.sampling_fields import ENGINE_SAMPLING, SAMPLING, STOPPING, Texts
from chairlift.v1 import generation_service_pb2 as pb

ROOT = Path(__file__).parents[3]
PROTO = (ROOT / "protos/chairlift/v1/generation_service.proto").read_text()
API, LIMITS = ((ROOT / "docs" / name).read_text() for name in ("api.md", "limits.md"))
TABLES = {"SamplingOptions": SAMPLING, "StopOptions": STOPPING}
ROWS = [(message, row) for message, table in TABLES.items() for row in table.values()]
IN_OTHER_FORM = {"logit_bias": "bias_ids", "bad_words": "bad_sequences", "time_budget_s": "time_budget_ms"}
"""Parameters that the engine's proto has under other names."""
FRONTEND_ONLY = {"stop_texts", "include_stop_text"}


@pytest.mark.parametrize("message", TABLES)
def test_public_proto_has_the_fields_of_the_table(message):
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name
    assert [row.public_name for row in TABLES[message].values()] == list(fields)


@pytest.mark.parametrize(("message", "row"), ROWS, ids=lambda each: getattr(each, "name", ""))
def test_public_proto_documents_what_the_table_says(message, row):
    body = PROTO.partition(f"message {message} {{")[2].partition("\n}")[0]
    comment = re.search(rf"((?:  // .*\n)+)  .* {row.public_name} = ", body)[1]
    assert f"{row.rule.doc}. {row.limits}" in " ".join(comment.replace("//", "").split())


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=lambda row: row.name)
def test_api_page_documents_what_the_table_says(row):
    line = f"| `{row.public_name}` | {row.rule.doc} | {row.range} | {row.unset} |".replace("|  |", "| |")
    assert line in API


def test_engine_proto_carries_every_parameter():
    carried = {*engine_pb.Sampling.DESCRIPTOR.fields_by_name, *engine_pb.TokenStops.DESCRIPTOR.fields_by_name}
    for name in {**SAMPLING, **STOPPING}.keys() - FRONTEND_ONLY:
        assert IN_OTHER_FORM.get(name, name) in carried


def test_engine_checks_every_scalar_that_it_draws_with():
    assert {name for name, row in SAMPLING.items() if row.kind in (int, float)} <= ENGINE_SAMPLING.keys()


def test_client_takes_every_parameter():
    assert {*SAMPLING, *STOPPING} <= GenerationOptions.__annotations__.keys()


@pytest.mark.parametrize("row", [row for _, row in ROWS if row.rule.max_entries], ids=lambda row: row.name)
def test_limits_page_says_the_most_entries(row):
    most = f"{row.rule.max_entries:,}"
    most += f" of {row.rule.max_entry_bytes} bytes each" if row.kind == Texts else ""
    words = row.name.replace("_", "[_ ]")
    assert re.search(rf"^\| `?{words}`? \| {most}\b", LIMITS, re.M)
