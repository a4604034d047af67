# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in that runs vLLM's own scheduler tests on our scheduler class.

    cd FOLDER_WITH_VLLMS_TESTS
    PYTHONPATH=.:.../tests/python:.../build/site python -m pytest -p vllm_suite \\
        tests/v1/core/test_scheduler.py tests/v1/core/test_async_scheduler.py \\
        tests/v1/core/test_priority_scheduler_random.py

The folder holds `tests` of vLLM's source archive of the same release. Wherever those tests make a
Scheduler or an AsyncScheduler they get ours; with PKV_SUITE=stock they get vLLM's, to compare. The
one model that they name is a configuration and a tokenizer of a few words, made here: nothing is
downloaded.
"""

import json
import os
import tempfile

MODEL = "facebook/opt-125m"
CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}


def _cache(folder):
    """A hub cache with that model in it."""
    snapshot = os.path.join(folder, "hub", "models--" + MODEL.replace("/", "--"), "snapshots", "0")
    refs = os.path.join(os.path.dirname(os.path.dirname(snapshot)), "refs")
    os.makedirs(snapshot)
    os.makedirs(refs)
    with open(os.path.join(refs, "main"), "w", encoding="utf-8") as f:
        f.write("0")
    words = {f"w{i}": i for i in range(1000)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    files = {
        "config.json": CONFIG,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    }
    for name, content in files.items():
        with open(os.path.join(snapshot, name), "w", encoding="utf-8") as f:
            json.dump(content, f)


def pytest_configure(config):
    for marker in ("cpu_test", "slow_test", "skip_global_cleanup", "optional"):
        config.addinivalue_line("markers", f"{marker}: of vLLM's tests")


_folder = tempfile.mkdtemp(prefix="pkv-suite-")
os.environ["HF_HOME"] = _folder
os.environ["HF_HUB_OFFLINE"] = "1"
_cache(_folder)

from vllm.platforms.interface import UnspecifiedPlatform  # noqa: E402 - after HF_HOME

UnspecifiedPlatform.device_type = "cpu"

if os.environ.get("PKV_SUITE", "ours") != "stock":
    import vllm.v1.core.sched.async_scheduler as async_module
    import vllm.v1.core.sched.scheduler as module
    from persistentkv.vllm.scheduler import PersistentKVScheduler, PersistentKVSyncScheduler

    module.Scheduler = PersistentKVSyncScheduler
    async_module.AsyncScheduler = PersistentKVScheduler
