"""Every mistake gets one message: the key, the value given, what is allowed, what to do."""

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.checks import MAX_NUM_THREADS
from hydraspec.config.choices import choices_of
from hydraspec.errors import ConfigurationError

METHODS = ", ".join(choices_of("method"))
SYNTHETIC = "method.verification=synthetic"
LENGTH = "method.synthetic_acceptance_length"

# what is typed → what the message has to say
REFUSED = {
    # misspelt
    "method=gema4_mtp": ["method=gema4_mtp", METHODS, "method=gemma4_mtp?"],
    "target=tiny_gema4": ["target=tiny_gema4", "tiny_gemma4_moe", "target=tiny_gemma4?"],
    "workload=gms8k": [
        "workload=gms8k",
        "gsm8k, humaneval, images, jsonl, mt_bench",
        "workload=gsm8k?",
    ],
    "workload=gsm8k": ["workload.path", "names no file", "grade-school-math"],
    "workload=gsm8k workload.path=x workload.shots_path=y": ["no effect with workload.num_shots=0"],
    "workload=gsm8k workload.path=x workload.num_shots=-1": ["0 or more"],
    "workload=gsm8k workload.path=x workload.thinking=true workload.chat=false": ["no chat templ"],
    "workload=spec_bench": ["workload.path", "names no file", "hemingkx/Spec-Bench"],
    "workload=speed_bench": ["workload.path", "names no file", "Evaluation Dataset License"],
    "workload=spec_bench workload.path=x +workload.category=qa": ["choose workload=speed_bench"],
    "workload=sharegpt workload.path=x workload.max_turns=0": ["1 or more, or null"],
    "+workload.num_shots=3": ["workload.num_shots=3", "choose workload=gsm8k"],
    "experiment=ksweep": ["did you mean experiment=k_sweep?"],
    "method=Gemma4_MTP": ["did you mean method=gemma4_mtp?"],
    "method.num_speculative_token=2": ["did you mean method.num_speculative_tokens=2?"],
    "metod=none": ["metod=none", "did you mean method=none?"],
    "engine.kv_cache.block=8": ["engine.kv_cache.block=8", "block_size, block_sizes, dtype, mem"],
    "workload.conc=3": ["did you mean workload.concurrency=3?"],
    "temperature=1": ["top-level keys are baseline", "did you mean sampling.temperature=1?"],
    "block_size=8": ["block_size=8 is no key", "did you mean engine.kv_cache.block_size=8?"],
    "engine.kv_cache_dtype=fp8": ["is no key", "mean engine.kv_cache.dtype=fp8?"],
    "kv_cache_dtype=fp8": ["is no key", "mean engine.kv_cache.dtype=fp8?"],
    "engine.kv_cache=fp8": ["is not a group", "its keys: ", "mean engine.kv_cache.dtype=fp8?"],
    "engine.kv_cache=7": ["is not a group", "set one of them, engine.kv_cache.<key>=<value>"],
    "engine.dtype=fp8": ["is no key", "mean engine.kv_cache.dtype=fp8?"],
    "min_survival=0.2": ["is no key", "mean method.options.min_survival=0.2?"],
    "method.min_survival=0.2": ["is no key", "mean method.options.min_survival=0.2?"],
    "method.foo=1": ["is no key", "to do: remove it"],
    "target.quantization=fp8": ["is no key", "the checkpoint says how its weights are held"],
    "target=gemma4_31b_int4": ["gemma4_31b_fp8 or target=gemma4_31b_w4a16?"],
    "target=gemma_31b": ["mean target=gemma4_31b?"],
    "checkpoint=/x": ["mean target.checkpoint=/x or method.checkpoint=/x?"],
    "seed.x=1": ["seed.x=1", "is a value itself", "write seed=<value>"],
    "target.drafters={eagle9:/x}": ["target.drafters.eagle9=/x", "eagle3, gemma4_mtp, mtp, pe"],
    "hydra.run.dirr=x": ["hydra.run.dirr", "did you mean hydra.run.dir?"],
    # added with +, also nested, also derived
    "+method.k=1": ["method.k=1 is no key", "num_speculative_tokens"],
    "+method.needs_checkpoint=false": ["needs_checkpoint=false is no key", "remove it"],
    "+method={needs_checkpoint:false}": ["method.needs_checkpoint=false is no key"],
    "+engine.kv_cache.pages=1": ["engine.kv_cache.pages=1 is no key", "memory_gib"],
    "+note=hello": ["note=hello is no key"],
    "+warnings=[x]": ["warnings=[x] is no key"],
    "++method._target_=os.system": ["_target_", "classes are chosen by name"],
    "method={name:none,k:1}": ["method.k=1 is no key", "num_speculative_tokens"],
    "+target.drafters.eagle4=/x": ["target.drafters.eagle4=/x", "gemma4_mtp"],
    # removed or empty
    "~method": ["method has no value", METHODS, "add method=<one of these>"],
    "~seed_": ["seed_"],
    "tracker=null": ["tracker=null", "none, wandb"],
    "target=custom": ["target.checkpoint has no value", "a hub id", "add target.checkpoint=<f"],
    "workload=jsonl": ["workload.path has no value", "JSON lines", "add workload.path=<file>"],
    "~method.num_speculative_tokens": ["has no value", "a whole number", "_tokens=<value>"],
    "target.checkpoint=''": ["target.checkpoint=''", "is empty"],
    "method.checkpoint=": ["method.checkpoint='' is empty", "leave the key out"],
    "method.num_speculative_tokens=null": ["=null is empty", "a whole number"],
    # a choice's name
    "sampling.name=stochastic": ["is not the name of sampling=greedy", "choose sampling=stoch"],
    "parallelism.name=foo": ["parallelism.name=foo", "parallelism=single"],
    "+workload.name=random": ["workload.name=random", "choose workload=random"],
    "target.name=foo": ["target.name=foo", "tiny_gemma4"],
    "method={name:none}": ["method.name=none is not the name", "choose method=none"],
    "method.name=null": ["method.name=null is not the name of method=gemma4_mtp"],
    "~method.name": ["method.name=null is not the name of method=gemma4_mtp"],
    # wrong types
    "method.num_speculative_tokens=three": ["=three is text", "a whole number"],
    "method.num_speculative_tokens=2.5": ["=2.5 is a number", "a whole number"],
    "method.num_speculative_tokens=true": ["=true is true or false", "a whole number"],
    "baseline=1": ["baseline=1", "true or false"],
    "seed=abc": ["seed=abc is text", "allowed: a whole number\n"],
    "target.max_model_len=abc": ["=abc is text", "a whole number, or null"],
    "tracker.entity=7": ["tracker.entity=7", "text, or null"],
    "sampling.stop=end": ["sampling.stop=end is text", "a list", "sampling.stop=[…]"],
    "sampling.stop_token_ids=[1,x]": ["sampling.stop_token_ids[1]=x"],
    "tracker.group=7": ["tracker.group=7", "quote it"],
    "target.dtype=float31": ["did you mean target.dtype=float32?"],
    "engine.device=gpu": ["engine.device=gpu", "auto, cpu, cuda", "mean engine.device=cuda?"],
    # other words for a choice, and words spelt like its opposite
    "engine.device=GPU:0": ["did you mean engine.device=cuda?"],
    "engine.device=cuda:1": ["did you mean engine.device=cuda?"],
    "engine.device=tpu": ["auto, cpu, cuda\n  to do: choose one of these"],
    "target.dtype=bf16": ["did you mean target.dtype=bfloat16?"],
    "target.dtype=half": ["did you mean target.dtype=float16?"],
    "target.dtype=float": ["did you mean target.dtype=float32?"],
    "target.dtype=double": ["did you mean target.dtype=float64?"],
    "target.dtype=float8": ["float64\n  to do: choose one of these"],
    "target.weights=dummy": ["did you mean target.weights=random?"],
    "engine.kv_cache.dtype=float8": ["did you mean engine.kv_cache.dtype=fp8?"],
    "engine.kv_cache.dtype=fp16": ["auto, fp8\n  to do: choose one of these"],
    "sampling.logprobs_mode=unprocessed": ["did you mean sampling.logprobs_mode=raw?"],
    "tracker.mode=enabled": ["did you mean tracker.mode=online?"],
    "tracker.mode=off": ["did you mean tracker.mode=disabled?"],
    "tracker=on": ["did you mean tracker=wandb?"],
    "cudagraph=on": ["did you mean cudagraph=full?"],
    "cudagraph=true": ["did you mean cudagraph=full?"],
    "cudagraph=off": ["did you mean cudagraph=none?"],
    "cudagraph=false": ["did you mean cudagraph=none?"],
    "method=on": ["method=on is no choice", "choose method=<choice> from these"],
    # out of range
    "method.num_speculative_tokens=0": ["1 to 32", "method=none"],
    "method.num_speculative_tokens=100": ["=100 is out of range", "1 to 32"],
    "seed=-1": ["seed=-1", "0 to"],
    "workload.request_rate=0": ["workload.request_rate=0", "requests per second above 0", "null"],
    "workload.request_rate=-1": ["workload.request_rate=-1", "above 0"],
    "workload.request_rate=inf": ["workload.request_rate=inf", "null to offer all at once"],
    "workload.request_rate=nan": ["workload.request_rate=nan", "above 0"],
    "workload.request_rate=fast": ["workload.request_rate=fast is text", "a number, or null"],
    "workload.request_rate=true": ["workload.request_rate=true", "a number, or null"],
    "workload.burstiness=0": ["workload.burstiness=0", "1 is Poisson"],
    "workload.burstiness=-2": ["workload.burstiness=-2", "above 0"],
    "workload.burstiness=inf": ["workload.burstiness=inf", "above 0"],
    "workload.burstiness=null": ["workload.burstiness=null", "a number"],
    "workload.goodput.ttft_ms=0": ["workload.goodput.ttft_ms=0", "above 0", "null for no limit"],
    "workload.goodput.ttft_ms=nan": ["workload.goodput.ttft_ms=nan", "above 0"],
    "workload.goodput.inter_token_ms=-5": ["goodput.inter_token_ms=-5", "milliseconds above 0"],
    "workload.goodput.itl=5": ["workload.goodput.itl=5", "inter_token_ms, ttft_ms"],
    "workload.goodput=5": ["workload.goodput=5", "inter_token_ms, ttft_ms"],
    "sampling.temperature=-0.1": ["sampling.temperature=-0.1", "0 (greedy), or 0.0001 to 100"],
    "sampling.temperature=nan": ["sampling.temperature=nan"],
    "sampling.temperature=1e-50": ["sampling.temperature=1e-50", "0.0001 to 100", "write 0"],
    "sampling.temperature=101": ["sampling.temperature=101"],
    "sampling.top_p=0": ["sampling.top_p=0", "sampling=greedy"],
    "sampling.top_p=1.1": ["sampling.top_p=1.1"],
    "sampling.min_p=1": ["sampling.min_p=1"],
    "sampling.top_k=-1": ["sampling.top_k=-1", "0 (off)"],
    "sampling.top_k=100000000000000000000": ["0 (off) to 2147483647"],
    "sampling.max_tokens=0": ["sampling.max_tokens=0"],
    "sampling.max_tokens=2147483648": ["1 to 2147483647"],
    "workload=random workload.output_tokens=2147483648": ["workload.output_tokens"],
    "seed=9223372036854775808": ["seed=9223372036854775808", "0 to 9223372036854775807"],
    "sampling.stop=['']": ["sampling.stop", "empty string"],
    "sampling.stop_token_ids=[-1]": ["sampling.stop_token_ids[0]=-1", "0 to 2147483647"],
    "sampling.stop_token_ids=[1,2147483648]": ["sampling.stop_token_ids[1]=2147483648"],
    "engine.kv_cache.block_size=12": ["block_size=12 is no power of two"],
    "engine.kv_cache.block_size=0": ["block_size=0"],
    "engine.kv_cache.dtype=fp4": ["engine.kv_cache.dtype=fp4", "auto, fp8"],
    "engine.kv_cache.dtype=fp8 target.dtype=float64": ["dtype=fp8 is not available with target"],
    "engine=transformers engine.kv_cache.dtype=fp8": ["engine.kv_cache.dtype=fp8", "native"],
    "engine.kv_cache.memory_gib=0": ["memory_gib=0"],
    "engine.kv_cache.memory_fraction=1": ["memory_fraction=1", "below 1"],
    "engine.kv_cache.memory_fraction=0.5 engine.kv_cache.memory_gib=2": [
        *("memory_fraction=0.5 is given beside engine.kv_cache.memory_gib", "leave one of the two"),
    ],
    "engine.kv_cache.block_sizes.full=12": ["block_sizes={full: 12}", "no power of two", "mapping"],
    "engine.kv_cache.block_sizes=8": ["block_sizes=8", "a mapping, each value a whole number"],
    "engine=vllm engine.kv_cache.memory_fraction=0.5": ["memory_fraction=0.5", "native"],
    "engine=transformers engine.kv_cache.block_sizes.full=8": ["sizes={full: 8}", "native"],
    "engine.max_num_seqs=0": ["engine.max_num_seqs=0"],
    "engine.max_num_batched_tokens=63": ["64 or more", "lower engine.max_num_seqs"],
    "engine.max_mixing_cost=0": ["engine.max_mixing_cost=0", "from 0.05 to 1, or null"],
    "engine.max_mixing_cost=8": ["engine.max_mixing_cost=8", "a larger one evens out"],
    "engine.max_mixing_cost=often": ["engine.max_mixing_cost=often", "a number"],
    "engine=transformers +engine.max_mixing_cost=0.1": ["no key of engine=transformers"],
    "engine=vllm +engine.max_mixing_cost=0.1": ["no key of engine=vllm", "choose engine=native"],
    "engine.num_threads=0": ["engine.num_threads=0", f"1 to {MAX_NUM_THREADS}, or null"],
    "engine.num_threads=100000": ["=100000", f"1 to {MAX_NUM_THREADS}, or null"],
    "target=custom target.checkpoint=a target.max_soft_tokens=100": [
        "target.max_soft_tokens=100",
        "one of 70, 140, 280, 560, 1120, or null",
    ],
    "engine=vllm target=gemma4_e2b method=none target.max_soft_tokens=70": [
        "target.max_soft_tokens=70",
        "null with engine.vllm.images=false",
        "add engine.vllm.images=true",
    ],
    "target.max_soft_tokens=70": ["no key of target=tiny_gemma4"],
    "target.max_model_len=1": ["target.max_model_len=1", "2 or more, or null"],
    "workload.limit=0": ["workload.limit=0", "null for all"],
    "workload.concurrency=0": ["workload.concurrency=0"],
    "cudagraph.capture_sizes=[4,2]": ["cudagraph.capture_sizes=[4, 2]", "rising", "sort them"],
    "cudagraph.capture_sizes=[0,2]": ["cudagraph.capture_sizes=[0, 2]", "from 1 on"],
    "cudagraph.max_mixed_rows=4096": ["cudagraph.max_mixed_rows=4096", "256 to 2048"],
    "cudagraph.capture_sizes=[1,4096]": ["1 to 16 (engine.max_num_seqs)", "max_num_seqs to 4096"],
    "tracker.project=": ["tracker.project='' names no project", "1 to 128", "tracker=none"],
    "tracker.project=a/b": ["tracker.project=a/b names no project"],
    f"tracker.project={'n' * 129}": ["names no project", "1 to 128"],
    "metrics.smallest_effect=3": ["=3.0 is out of range", "from 0 to 0.5, such as 0.03"],
    "parallelism.tensor=0": ["parallelism.tensor=0 is out of range", "1 or more"],
    "parallelism.pipeline=-1": ["parallelism.pipeline=-1 is out of range", "1 or more"],
    "parallelism.data=0": ["parallelism.data=0 is out of range", "1 or more"],
    "parallelism.tensor=1.5": ["parallelism.tensor=1.5 is a number", "a whole number"],
    "parallelism=tp3": ["parallelism=tp3 is no choice", "dp2, pp2, pp4, single, tp2, tp2_pp2, tp4"],
    "parallelism.timeout_s=1": ["parallelism.timeout_s=1", "5 or more, in seconds"],
    # Hydra's own keys: nothing typed may name code, or lead outside the run folder
    "hydra.job_logging.handlers.console.class=os.system": ["class=os.system names code"],
    "+hydra.callbacks.a={_target_:os.system}": ["hydra.callbacks.a._target_=os.system names code"],
    "hydra.launcher._target_=os.system": ["hydra.launcher._target_=os.system names code"],
    "hydra.job_logging.handlers.console.stream=ext://os.x": ["only levels", "hydra.verbose=true"],
    "hydra.job_logging.root.level=os.x": ["only levels", "root.level=<one of CRITICAL"],
    "hydra/launcher=ray": ["hydra/launcher=ray is not available", "allowed: basic"],
    "hydra.output_subdir=../x": ["hydra.output_subdir=../x is no folder inside the run folder"],
    "hydra.output_subdir=/x": ["hydra.output_subdir=/x is no folder inside", "null, or a name"],
    # combinations
    "parallelism.tensor=2000": [
        *("parallelism.tensor=2000 makes 2000 ranks", "1024 or less"),
        "as many ranks as there are devices",
    ],
    "parallelism.pipeline=64 parallelism.data=64": ["pipeline=64 makes 4096 ranks"],
    SYNTHETIC: [f"{LENGTH}=null", "1 to 4", "method.verification=standard"],
    f"{LENGTH}=2.0": [f"{LENGTH}=2", "verification=standard", SYNTHETIC],
    f"{SYNTHETIC} {LENGTH}=4.5": [f"{LENGTH}=4.5", "1 to 4"],
    f"method.verification=block {LENGTH}=2.0": ["verification=block"],
    "method.synthetic_trace=x": ["trace=x has no meaning with verification=standard", SYNTHETIC],
    f"{SYNTHETIC} method.synthetic_trace=x {LENGTH}=2": ["trace=x", "one of the two keys"],
    f"{SYNTHETIC} method.synthetic_trace=x engine=vllm": ["trace=x", "engine=native"],
    f"{SYNTHETIC} {LENGTH}=2 method.synthetic_category=x": ["category=x", "add method.synthetic_t"],
    f"{SYNTHETIC} {LENGTH}=2 method.synthetic_undraftable=0.5": ["there is no record"],
    f"{SYNTHETIC} method.synthetic_trace=x method.synthetic_undraftable=2": ["0 to 1, e.g. 0.5"],
    "workload.num_requests=3": [
        *("workload.num_requests=3 is no key of workload=tiny", "limit, path, request_rate\n"),
        "choose workload=images or workload=random",
    ],
    "bench.engines=[native]": ["bench.engines=[native]", "bench=none has no keys", "bench=decode"],
    "+bench.engines=[native]": ["bench=none has no keys", "choose bench=context or bench=dec"],
    "bench=decode +bench.rates=[1]": ["is no key of bench=decode", "choose bench=serve, or leave"],
    "engine=transformers +engine.kv_cache.block_size=4": ["is no key of engine=transformers"],
    "engine=transformers engine.prefix_caching=false": [
        *("engine.prefix_caching=false is no key of engine=transformers", "native"),
    ],
    "engine=transformers engine.kv_cache.block_size=4": [
        *("engine.kv_cache.block_size=4 is no key of engine=transformers", "num_threads"),
        "choose engine=native, or leave it out",
    ],
    "engine=vllm engine.kv_cache.block_size=4": [
        "keys of engine.kv_cache are dtype, memory_gib",
        "nativ",
    ],
    "workload=random target.max_model_len=767": ["=512 and", "output_tokens=256", "takes 767"],
    "+workload.num_requests=3": ["workload.num_requests=3", "workload=random"],
    "workload=shared_prefix target.max_model_len=639": ["prefix_tokens=256 and", "takes 639"],
    "workload=multi_turn workload.path=null target.max_model_len=1311": [
        *("workload.turn_tokens=200 and", "output_tokens=128 and workload.num_turns=4 make 1312"),
    ],
    "workload=multi_turn workload.turn_tokens=8": [
        *("turn_tokens=8 has no meaning with workload=multi_turn and workload.path=zoo:tiny",),
        *(
            "limit, num_conversations, num_turns, path, request_rate",
            "workload.path=null for random token ids",
        ),
    ],
    "workload=multi_turn workload.num_turns=0": ["workload.num_turns=0", "1 or more"],
    "workload=shared_prefix +workload.path=x": ["workload.path=x", "workload=jsonl"],
    "+workload.prefix_tokens=3": ["workload.prefix_tokens=3", "choose workload=shared_prefix"],
    "workload=random +workload.path=x": ["workload.path=x", "workload=jsonl"],
    "tracker=none tracker.project=x": ["tracker.project=x is no key of", "tracker=wandb"],
    "method.name=eagle4": ["method.name=eagle4"],
    "method=eagle": ["method=eagle", "target tiny_gemma4 names none", "=auto or method=none"],
    "target=tiny_qwen3 method=gemma4_mtp": [
        *("names none", "eagle3: zoo:tiny_qwen3-eagle3, peagle: "),
        "or choose method=eagle3 or another of these methods, method=auto or method=none",
    ],
    "target=tiny_qwen3 method=gemma4_mtp engine=transformers": ["hub id>, or choose method=none"],
    "engine=transformers method=eagle3": ["method=eagle3 is not available with engine=transf"],
    "cudagraph.name=half": ["cudagraph.name=half", "full_decode_only, none, piecewise"],
    # what Hydra's grammar does not take
    "method": ["method: cannot be read", "write key=value"],
    "target.checkpoint=/a=b": ["target.checkpoint='/a=b'"],
    "method=none,gemma4_mtp": ["several values for one run", "add -m"],
    "target.checkpoint=${nowhere}": ["target.checkpoint", "nowhere"],
    "+target=tiny_gemma4": ["target"],
}


@pytest.mark.parametrize("typed", REFUSED)
def test_refused_with_key_value_range_and_remedy(typed):
    with pytest.raises(ConfigurationError) as refused:
        plan(typed.split(" "))
    message = str(refused.value)
    for part in REFUSED[typed]:
        assert part in message
    assert refused.value.exit_code == 2
    _, allowed, remedy = message.splitlines()
    assert allowed.startswith("  allowed: ")
    assert remedy.startswith("  to do: ")


@pytest.mark.parametrize(
    "typed",
    [
        *("method.num_speculative_tokens=1,100", "method=none,gemma5", "seed=1,x", "nokey=1,2"),
        *("tracker=none,null", "method.name=none,eagle3", "method.needs_checkpoint=true,false"),
    ],
)
def test_a_sweep_is_refused_for_its_worst_job(typed):
    with pytest.raises(ConfigurationError, match=typed.split("=")[0]):
        plan([typed], multirun=True)


@pytest.mark.parametrize(
    "typed",
    [
        "method.num_speculative_tokens=32",
        f"{SYNTHETIC} {LENGTH}=4",
        "engine.kv_cache.block_size=1",
        "sampling.top_p=1 sampling.min_p=0",
        "sampling.temperature=0.0001 sampling.top_k=2147483647 seed=9223372036854775807",
        "sampling.temperature=100 sampling.max_tokens=2147483647",
        "workload.limit=null workload.concurrency=null",
        "method.verification=block method.draft_sampling=probabilistic sampling=stochastic",
        "target.checkpoint='/a=b'",
        "+target.max_model_len=64",
        "engine.max_num_batched_tokens=64",
        "method.name=gemma4_mtp",
        "method=gemma4 method.name=gemma4_mtp",
        "workload=random target.max_model_len=768",
        "workload=shared_prefix target.max_model_len=640",
        "workload=multi_turn target.max_model_len=639",
        "workload=multi_turn workload.path=null target.max_model_len=1312",
        f"engine.num_threads={MAX_NUM_THREADS}",
    ],
)
def test_edges_that_are_allowed(typed):
    plan(typed.split(" "))
