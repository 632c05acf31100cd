from engine.bench.engine_options import engine_flags
from engine.config import EngineConfig, parse_config


def test_flags_give_back_the_configuration() -> None:
    config = EngineConfig(
        model="somewhere",
        load_format="dummy",
        max_num_seqs=7,
        enable_prefix_caching=False,
        shutdown_timeout_s=3.0,
        threads=2,
        quantization="int8",
    )
    assert parse_config(engine_flags(config), {}) == config
    assert engine_flags(EngineConfig(model="m")) == ["--model", "m"]
