"""Flags, refusals and inertness, in one process that loads SGLang and the plugin as the launcher does."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sgl_ragged import register
from sgl_ragged.contract_checks import resolve
from sgl_ragged.errors import TO_ENGINE, RaggedConfigError
from sgl_ragged.features.host_tier import launch as host_tier
from sgl_ragged.launch import checks, resolution
from sgl_ragged.launch.command_line import all_flags, make_options
from sgl_ragged.launch.flags import dashed
from sgl_ragged.launch.plan import ATTRIBUTE
from sgl_ragged.serve.hooks import HOOKS
from sgl_ragged.sglang_contract import SERVING
from tests.models import make_llama, make_profile, make_qwen3

load_plugins()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))


def resolved(model, *flags: str) -> ServerArgs:
    """Arguments as the launcher resolves them; exits as the launcher does."""
    equal = () if "ragged" not in flags or "--ragged-profile" in flags else ("--ragged-profile", "uniform")
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags, *equal])
    args.resolve_once()
    return args


WIDE = ("--ragged-slab-dtype", "wide")


def refusal(model, *flags: str) -> str:
    """The one line with which the launcher ends."""
    with pytest.raises(SystemExit) as ended:
        resolved(model, *flags)
    message = str(ended.value.code)
    assert message.startswith("sgl_ragged: ")
    assert "\n" not in message
    return message


def test_one_flag_is_enough(llama):
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolved(llama, "--kv-pool", "ragged")
    options, view = getattr(args, ATTRIBUTE), resolving_view(args)
    plan = options.plan
    assert (plan.ratio, plan.segment, plan.scorer, plan.kernel) == (0.3, 256, "keydiff", "numba")
    assert plan.form.name == "k6v6"
    assert (view.page_size, view.attention_backend) == (256, "ragged")


def test_default_chunks_are_whole_segments(llama):
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolved(llama, "--kv-pool", "ragged", "--ragged-segment", "48")
    assert resolving_view(args).chunked_prefill_size % 48 == 0
    args.check_server_args()


def test_options_travel_to_the_workers(llama):
    args = resolved(llama, "--kv-pool", "ragged", "--ragged-ratio", "0.3")
    assert getattr(pickle.loads(pickle.dumps(args)), ATTRIBUTE) == getattr(args, ATTRIBUTE)


def test_without_the_flag_nothing_changes(llama):
    """Page size, backend and pool class are SGLang's own, no option is carried, no seam of the worker is wrapped."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import publish

    args = resolved(llama)
    view = resolving_view(args)
    assert not hasattr(args, ATTRIBUTE)
    assert (view.page_size, view.attention_backend) == (1, "torch_native")
    publish(args, role="scheduler")
    assert all(not hasattr(resolve(hook.target), "__wrapped__") for hook in HOOKS)
    assert KVCacheConfigurator._build_token_to_kv_pool.__module__ == KVCacheConfigurator.__module__
    pool_class = KVCacheConfigurator._resolve_kv_pool_class(None, kind="mha", default=MHATokenToKVPool)
    assert pool_class is MHATokenToKVPool


def test_engine_takes_the_flags_as_keywords():
    from sglang.srt.entrypoints.engine import Engine

    register.extend_engine()  # here the plugin was loaded before the engine's module; Engine.__init__ does it itself
    args = Engine.server_args_class(model_path="m", kv_pool="ragged", ragged_ratio=0.25, kv_bytes="1GiB")
    options = getattr(args, ATTRIBUTE)
    assert (options.kv_pool, options.ratio, options.kv_bytes) == ("ragged", 0.25, 2**30)
    assert not hasattr(Engine.server_args_class(model_path="m"), ATTRIBUTE)
    with pytest.raises(RaggedConfigError, match="outside"):
        Engine.server_args_class(model_path="m", kv_pool="ragged", ragged_ratio=1.5)


CHAINS = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ragged-ratio", "0"), "outside (0, 1]"),
        (("--ragged-ratio", "1.01"), "outside (0, 1]"),
        (("--ragged-ratio", "nan"), "outside (0, 1]"),
        (("--ragged-segment", "250"), "multiple of 16"),
        ((*WIDE, "--ragged-ratio", "0.001"), "a ratio of 0.0625; use that ratio, or segments of 16384 tokens"),
        (
            (*WIDE, "--ragged-ratio", "0.3", "--ragged-segment", "32"),
            "a ratio of 0.5; use that ratio, or segments of 64",
        ),
        (("--ragged-ratio", "0.001"), "a ratio of 0.0167; use that ratio, or segments of 8192 tokens"),
        (("--ragged-scorer", "best"), "known: expected_attention, fastkvzip, gate, h2o, key_norm, keydiff"),
        (("--ragged-scorer", "fastkvzip"), "pass --ragged-scorer-weights FILE"),
        (("--ragged-scorer", "expected_attention"), "python -m calib run --scorer expected_attention"),
        (("--ragged-scorer-weights", "gates.safetensors"), "'keydiff' has no weights"),
        (("--kv-bytes", "many"), "cannot read 'many'"),
        (("--page-size", "1"), "--page-size 1 differs from the segment length 256"),
        (
            ("--speculative-algorithm", "DFLASH"),
            "DFLASH is not supported with --kv-pool ragged, where NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN are; use",
        ),
        (("--speculative-algorithm", "NGRAM"), "chains, no trees: set --speculative-ngram-max-bfs-breadth 1"),
        ((*CHAINS, "--speculative-ngram-external-corpus-path", "f"), "an external corpus"),
        ((*CHAINS, "--ragged-history", "1024"), "--speculative-algorithm is not supported with --ragged-history"),
        (("--attention-backend", "torch_native"), "drop --attention-backend"),
        (("--kv-cache-dtype", "nvfp4"), "supports FP8; use --kv-cache-dtype fp8_e4m3"),
        (("--kv-cache-dtype", "mxfp8"), "supports FP8; use --kv-cache-dtype fp8_e4m3"),
        (("--chunked-prefill-size", "128"), "set it to 256"),
        (("--chunked-prefill-size", "1000"), "set it to 768"),
        (("--disaggregation-mode", "prefill"), "disaggregation"),
        pytest.param(
            ("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"),
            "backend mooncake has not been tested",
        ),
        pytest.param(("--enable-hierarchical-cache", "--hicache-host-memory-mode", "buffer_only"), "a mere buffer"),
        pytest.param(
            ("--enable-hierarchical-cache", "--ragged-host-codec", "fp8", "--kv-cache-dtype", "fp8_e5m2"),
            "--ragged-host-codec fp8 is for a KV cache that is wider",
        ),
        (("--radix-cache-backend", "mine"), "knows open segments; drop --radix-cache-backend"),
        (("--ragged-restore", "load"), "add --enable-hierarchical-cache"),
        (("--ragged-host-codec", "fp8"), "add --enable-hierarchical-cache"),
        (("--ragged-host-codec", "exact"), "add --enable-hierarchical-cache"),
        (("--pp-size", "2", "--ragged-history", "1024"), "--pp-size is not supported with --ragged-history"),
        *(
            (flags, words)
            for flags, words in (
                (("--ragged-history", "1000"), "must be a multiple of the segment length 256, and at least 3 segments"),
                (("--ragged-history", "512"), "try 768"),
                (("--ragged-history", "many"), "--ragged-history 'many' is not a number"),
                (("--ragged-history-score", "recency"), "add --ragged-history"),
                (("--ragged-history", "1024", "--ragged-history-score", "age"), "unknown --ragged-history-score 'age'"),
                (("--ragged-history", "1024", "--ragged-history-score", "value_novelty"), "the profile has none"),
                (("--ragged-history", "1024", "--enable-mixed-chunk"), "decodes within prefill"),
                (("--ragged-overlay", "32"), "add --ragged-reservoir"),
                (("--ragged-reservoir", "1GiB", "--ragged-overlay", "0"), "--ragged-overlay 0 must be at least 1"),
                (("--ragged-reservoir", "1GiB", "--ragged-watch-interval", "2"), "watch-interval 2 must be at least 3"),
                (("--ragged-reservoir", "1GiB", "--ragged-drift", "2"), "--ragged-drift 2.0 is outside [0, 1]"),
                (("--ragged-reservoir", "1GiB", "--ragged-history", "1024"), "frees segments"),
                (("--ragged-reservoir", "1GiB", "--enable-hierarchical-cache"), "segments lack what heads dropped"),
                (("--ragged-reservoir", "1GiB", "--tp", "8"), "only some of the queries of a pivot"),
                (("--ragged-reservoir", "1GiB", "--tp", "2", "--ragged-fairkv", "split"), "pivots must be whole"),
                (("--ragged-reservoir", "1GiB", "--ragged-kernel", "flashinfer"), "flashinfer plans without overlays"),
                (("--ragged-reservoir", "1GiB", "--enable-mixed-chunk"), "decodes within prefill"),
                (("--ragged-reservoir", "1GiB", "--ragged-profile", "uniform"), "which heads watch for which"),
                (("--ragged-history", "1024", "--chunked-prefill-size", "1024"), "use 512"),
            )
        ),
        (("--ragged-profile", "/no/such/file"), "does not exist"),
        (("--ragged-profile", "/dev"), "is a directory"),
        (("--ragged-profile", "/dev/null"), "is no regular file"),
        (("--kv-bytes", "1e999"), "cannot read '1e999' as a number of bytes"),
        (("--max-running-requests", "0"), "--max-running-requests 0 must be at least 1"),
        (("--max-total-tokens", "255"), "at least 256, or take a smaller --ragged-segment"),
        (("--nnodes", "2"), "give all nodes the same --dist-init-addr HOST:PORT"),
        (("--enable-torch-compile",), "torch.compile"),
        (("--enable-deterministic-inference",), "deterministic inference"),
        (("--rl-on-policy-target", "fsdp"), "deterministic inference"),
        (("--enable-mis",), "multi-item scoring"),
        (("--cuda-graph-backend-prefill", "breakable"), "need a CUDA device and --ragged-kernel triton"),
        (("--cuda-graph-backend-prefill", "breakable", "--ragged-kernel", "torch"), "CUDA graphs of prefill"),
        (("--cuda-graph-config", '{"prefill": {"backend": "full"}}'), "CUDA graphs of prefill"),
        (("--ragged-kernel", "torch", "--cuda-graph-backend-decode", "full"), "CUDA graphs of decode"),
    ],
)
def test_bad_input_is_refused_in_one_line(llama, flags, words):
    assert words in refusal(llama, "--kv-pool", "ragged", *flags)


def test_warns_of_a_pool_that_is_not_sized_after_captures(llama, monkeypatch):

    said: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", said.append)
    resolved(llama, "--kv-pool", "ragged")
    assert said == []
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    resolved(llama, "--kv-pool", "ragged")
    (line,) = said
    assert line.startswith("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING does nothing with --kv-pool ragged")


def test_environment_that_would_skip_sealing_is_refused(llama, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    assert "unset it" in refusal(llama, "--kv-pool", "ragged")
    resolved(llama)


@pytest.mark.parametrize("flags", [(), ("--ragged-kernel", "torch")])
def test_graphs_are_off_before_memory_is_sized(llama, monkeypatch, flags):
    """SGLang reserves less memory if it will capture prefill (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor import cuda_graph_config

    seen = []

    def handle_gpu_memory_settings(args):
        graphs = resolving_view(args).cuda_graph_config
        seen.append((graphs.prefill.backend, graphs.decode.backend))
        original(args)

    original = memory_hook.handle_gpu_memory_settings
    monkeypatch.setattr(memory_hook, "handle_gpu_memory_settings", handle_gpu_memory_settings)
    on_cuda = cuda_graph_config.CudaGraphConfig()
    on_cuda.prefill.backend, on_cuda.decode.backend = "breakable", "full"
    monkeypatch.setattr("sglang.srt.arg_groups.cuda_graph_hook.default_cuda_graph_config", lambda: on_cuda)
    monkeypatch.setattr("sglang.srt.arg_groups.cuda_graph_hook.apply_cuda_graph_compatibility", lambda args: None)
    resolved(llama, "--kv-pool", "ragged", *flags)
    assert seen == [("disabled", "disabled" if flags else "full")]


@pytest.mark.parametrize("segment", [48, 192, 272])
def test_on_cuda_a_segment_is_a_power_of_two(segment):
    checks.refuse_segment(segment, "cpu")
    checks.refuse_segment(256, "cuda")
    with pytest.raises(
        RaggedConfigError, match=f"--ragged-segment {segment} is no power of two.*use .* or (64|256|512)"
    ):
        checks.refuse_segment(segment, "cuda")


def test_files_are_read_once_by_the_launcher(llama, tmp_path):
    """Whatever becomes of the profile while workers start, they are laid out as the launcher read it."""
    from sgl_ragged.profiles.profile import profile_kept

    path = tmp_path / "p.safetensors"
    profile = make_profile(llama, path)
    args = resolved(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))
    path.write_bytes(b"another file")
    plan = getattr(pickle.loads(pickle.dumps(args)), ATTRIBUTE).plan
    tokens = plan.form.token_share(0.3, 64, 2, 256)
    assert plan.layout(0).kept.tolist() == profile_kept(profile, tokens, 256).tolist()
    assert plan.rank_statistics(0) == [{}, {}, {}]
    assert plan.digest == getattr(args, ATTRIBUTE).plan.digest


def test_a_worker_refuses_the_dtype_that_sglang_resolved():
    from sgl_ragged.serve.worker import size_pool

    with pytest.raises(RaggedConfigError, match="resolved the KV cache's dtype to float8_e4m3fnuz"):
        size_pool(None, SimpleNamespace(kv_cache_dtype=torch.float8_e4m3fnuz), 0)


@pytest.mark.parametrize(("status", "kind"), [(TO_ENGINE, RaggedConfigError), (1, RuntimeError)])
def test_a_worker_that_has_said_why_ends_an_engine_without_sglang_guessing(status, kind):
    error = resolution.answer_dead_worker(lambda *_: RuntimeError("died"), 0, SimpleNamespace(exitcode=status))
    assert type(error) is kind


def test_forbidden_flags_exist():
    """A misspelt name would never be looked at; an ordinary start must pass all of them."""
    args = ServerArgs(model_path="m")
    for name, fine, _ in checks.REFUSED_VALUES:
        assert getattr(args, name) in fine


def test_ragged_flags_need_the_pool(llama):
    assert "without --kv-pool ragged" in refusal(llama, "--ragged-ratio", "0.3")


def test_profile_of_another_model_is_refused(llama, qwen3, tmp_path):
    path = tmp_path / "p.safetensors"
    make_profile(qwen3, path)
    assert "pass a profile of this model" in refusal(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))
    make_profile(llama, path, scorer="key_norm")
    given = ("--kv-pool", "ragged", "--ragged-profile", str(path))
    assert "--ragged-scorer is 'keydiff'" in refusal(llama, *given, "--ragged-scorer", "keydiff")
    make_profile(llama, path)
    resolved(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))


def test_tampered_profile_is_refused(llama, tmp_path):
    path = tmp_path / "p.safetensors"
    make_profile(llama, path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    assert "does not match its own digest" in refusal(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))
    save_file({"weight": torch.zeros(2, dtype=torch.bfloat16)}, path)
    assert "not an sgl_ragged profile" in refusal(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))
    path.write_bytes(bytes(data[:100]))
    assert "cannot be read" in refusal(llama, "--kv-pool", "ragged", "--ragged-profile", str(path))


def test_mla_model_is_refused(tmp_path):
    from transformers import DeepseekV2Config

    DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"], num_hidden_layers=2, hidden_size=256, num_attention_heads=4
    ).save_pretrained(tmp_path)
    assert "MLA attention" in refusal(tmp_path, "--kv-pool", "ragged")


@pytest.mark.parametrize("target", [target for target, parameters in SERVING.items() if parameters is not None])
def test_renamed_function_is_refused(llama, monkeypatch, target):
    """A hook target that upstream has renamed, or whose parameters changed."""
    owner, name = target.rsplit(".", 1)
    owner = resolve(owner)
    original = getattr(owner, name)
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    # A method may have another of that name behind it.
    if not hasattr(owner, name):
        assert f"{target} (missing)" in refusal(llama, "--kv-pool", "ragged")
    monkeypatch.setattr(owner, name, lambda self, something_else: original(self), raising=False)
    assert f"{target} (takes self, something_else)" in refusal(llama, "--kv-pool", "ragged")


def test_a_flag_hook_that_did_not_take_is_refused(llama, monkeypatch):
    """SGLang swallows the errors of hooks: flags that nothing would honour must not be accepted."""
    target = "sglang.srt.server_args.set_global_server_args_for_tokenizer"
    monkeypatch.setattr(register, "_hooked", [*register._hooked, (target, resolve(target))])
    assert f"could not hook {target}" in refusal(llama, "--kv-pool", "ragged")


def test_kv_bytes_alone_is_checked_too(llama, monkeypatch):
    owner = resolve("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator")
    monkeypatch.delattr(owner, "_profile_available_bytes")
    assert "_profile_available_bytes (missing)" in refusal(llama, "--kv-bytes", "1GiB")


def test_help_shows_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        prepare_server_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for keyword, one in all_flags().items():
        assert dashed(keyword) in shown
        assert one.default is None or f"[{one.default}]" in shown
    assert "Host memory of all ranks together" in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ragged_ratio": "much"}, "--ragged-ratio 'much' is not a number"),
        ({"ragged_segment": 2.5}, "multiple of 16"),
        ({"ragged_kernel": "best"}, "unknown --ragged-kernel 'best'; known: auto, torch, numba, triton, flashinfer"),
        (
            {"ragged_slab_dtype": "int2"},
            "unknown --ragged-slab-dtype 'int2'; known: auto, wide, int8, k8v6, k8v5, k8v4",
        ),
        ({"ragged_host_codec": "zip"}, "unknown --ragged-host-codec 'zip'; known: exact, fp8, shared"),
        ({"kv_pool": "paged"}, "unknown --kv-pool 'paged'; known: token, ragged"),
        ({"ragged_scorer": "none"}, "unknown scorer"),
    ],
)
def test_values_of_keywords_are_checked_as_flags_are(given, words):
    with pytest.raises(RaggedConfigError, match=re.escape(words)):
        make_options({"kv_pool": "ragged"} | given, from_command_line=False)


def test_nothing_asked_means_no_options():
    assert make_options({}, from_command_line=True) is None
    assert make_options({"kv_pool": "token"}, from_command_line=True) is None
    assert make_options({"kv_pool": "token", "kv_bytes": "1k"}, from_command_line=True).kv_bytes == 1000


def test_a_tier_of_another_server_holds_something_else(llama, tmp_path):
    """Whatever changes slabs changes what names them; what does not, does not."""

    def served(model, *flags: str) -> str:
        args = resolved(model, "--kv-pool", "ragged", "--enable-hierarchical-cache", *flags)
        return getattr(args, ATTRIBUTE).plan.settings_of("tier").served

    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    own = served(llama)
    # copytree keeps times: the same weights elsewhere.
    assert served(copy) == own
    assert served(llama, "--max-running-requests", "3", "--hicache-size", "7") == own
    for name, content in (("tokenizer_config.json", "{}"), ("generation_config.json", "{}")):
        (copy / name).write_text(content)
    assert served(copy) == own, "which tokens a text becomes is not what slabs of tokens hold"
    assert served(llama, "--context-length", "4096") == own
    others = []
    config = json.loads((copy / "config.json").read_text())
    # Another config; code and a quantisation config that come with the model; weights of another time.
    for name, content in (("config.json", json.dumps(config | {"rms_norm_eps": 1e-3})), ("modeling_own.py", "pass")):
        (copy / name).write_text(content)
        others.append(served(copy))
    (copy / "hf_quant_config.json").write_text("{}")
    others.append(served(copy))
    os.utime(copy / "model.safetensors", (0, 0))
    others.append(served(copy))
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}
    others += [
        served(llama, "--json-model-override-args", json.dumps(rope)),
        served(llama, "--model-impl", "transformers"),
        served(llama, "--model-loader-extra-config", '{"enable_multithread_load": false}'),
        served(llama, "--ragged-ratio", "0.2"),
        served(llama, *WIDE),
        served(llama, "--ragged-segment", "128"),
        served(llama, "--ragged-scorer", "snapkv"),
        served(llama, "--dtype", "float16"),
    ]
    assert len({own, *others}) == 1 + len(others)


def test_a_release_without_the_seams_of_a_tier_serves_without_it(llama, monkeypatch):
    lacking = {"sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.no_such_strategy": ("strategy",)}
    monkeypatch.setattr(host_tier.FEATURE, "contract", lacking)
    message = refusal(llama, "--kv-pool", "ragged", "--enable-hierarchical-cache")
    assert "is not supported with --enable-hierarchical-cache" in message
    resolved(llama, "--kv-pool", "ragged")


def test_the_launcher_leaves_budgets_to_workers_and_signs_its_hooks(llama):
    """In a process of its own, since hooks are there once per process. Workers say what budgets are."""
    program = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from tests.launch.test_plugin import resolved\n"
        "for _ in range(2): resolved(sys.argv[1], '--kv-pool', 'ragged', '--ragged-profile', 'uniform')\n"
    )
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(llama)], capture_output=True, text=True, cwd=folder)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "every head keeps the same share" not in log
    assert "(from: unknown)" not in log
