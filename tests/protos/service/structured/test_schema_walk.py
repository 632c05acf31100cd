"""All subschemas are found, each once, in steps that grow with the schema and not with its square."""

from chairlift.service.structured.schema_walk import subschemas


class Counted(dict):
    """Definitions that count how often they are walked."""

    num_walks = 0

    def items(self):
        self.num_walks += 1
        return super().items()


def test_references_that_are_no_pointers_walk_the_definitions_once():
    definitions = Counted({f"d{i}": {"$anchor": f"a{i}", "$ref": "#a0"} for i in range(300)})
    root = {"anyOf": [{"$ref": f"#a{i}"} for i in range(300)], "$defs": definitions}
    paths = [subschema.path for subschema in subschemas(root)]
    assert len(paths) == len(set(paths)) == 601
    assert {f"$defs.d{i}" for i in range(300)} < set(paths)
    assert definitions.num_walks == 1
