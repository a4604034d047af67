# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in that runs vLLM's own scheduler tests on our scheduler class.

    cd FOLDER_WITH_VLLMS_TESTS
    PYTHONPATH=.:.../tests/python:.../build/site python -m pytest --noconftest \\
        -p vllm_suite tests/v1/core/test_scheduler.py tests/v1/core/test_async_scheduler.py \\
        tests/v1/core/test_priority_scheduler_random.py

The folder holds `tests` of vLLM's source archive of the same release. Wherever those tests make a
Scheduler or an AsyncScheduler they get ours; with PKV_SUITE=stock they get vLLM's, to compare. Of
the models that they name, configurations and a tokenizer of a few words are made here: nothing is
downloaded.
"""

import json
import logging
import os
import tempfile

import pytest

_TEXT = {
    "vocab_size": 32064,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
# 24 x 24 patches and no more: 576 tokens an image.
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 900,
    "image_token_id": 900,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", **_TEXT},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 64,
    },
    "torch_dtype": "float16",
}
# Every fourth layer attends to all tokens, the others are linear; a predicted token as a draft.
_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 32064,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_SEEING = {"preprocessor_config.json": _IMAGES, "processor_config.json": _PROCESSOR}
# The tests need no more of the second model than that it takes images.
MODELS = {
    "facebook/opt-125m": {"config.json": _OPT},
    "llava-hf/llava-1.5-7b-hf": {"config.json": _LLAVA, **_SEEING},
    "Qwen/Qwen2.5-VL-3B-Instruct": {"config.json": _LLAVA, **_SEEING},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"config.json": _NEXT},
}


def _tokenizer():
    image = {"id": 900, "content": "<image>", "special": True, "normalized": False}
    image.update({"single_word": False, "lstrip": False, "rstrip": False})
    words = {f"w{i}": i for i in range(900)}
    return {
        "version": "1.0",
        "added_tokens": [image],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }


def _cache(folder):
    """A hub cache with those models in it."""
    common = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "w0",
        },
    }
    for model, own in MODELS.items():
        root = os.path.join(folder, "hub", "models--" + model.replace("/", "--"))
        snapshot = os.path.join(root, "snapshots", "0")
        os.makedirs(snapshot)
        os.makedirs(os.path.join(root, "refs"))
        with open(os.path.join(root, "refs", "main"), "w", encoding="utf-8") as f:
            f.write("0")
        for name, content in {**common, **own}.items():
            with open(os.path.join(snapshot, name), "w", encoding="utf-8") as f:
                json.dump(content, f)


@pytest.fixture
def caplog_vllm(caplog):
    """Of vLLM's own conftest, which wants more of its tests than is here."""
    vllms = logging.getLogger("vllm")
    before, vllms.propagate = vllms.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    vllms.propagate = before


def pytest_configure(config):
    for marker in ("cpu_test", "slow_test", "skip_global_cleanup", "optional"):
        config.addinivalue_line("markers", f"{marker}: of vLLM's tests")


_folder = tempfile.mkdtemp(prefix="pkv-suite-")
os.environ["HF_HOME"] = _folder
os.environ["HF_HUB_OFFLINE"] = "1"
_cache(_folder)

from vllm.platforms.interface import UnspecifiedPlatform  # noqa: E402 - after HF_HOME

UnspecifiedPlatform.device_type = "cpu"

import transformers.models.pixtral.modeling_pixtral as pixtral  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402

# A release of transformers newer than this vLLM: Llava's module wants names of it, no test does.
pixtral.__getattr__ = lambda name: object

registry._run_in_subprocess = lambda function: function()  # which would not know the platform

import vllm.v1.core.sched.scheduler as module  # noqa: E402
from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget  # noqa: E402


class _Budget:
    """Of Llava, without its image processor: 576 tokens an image. What follows is vLLM's rule."""

    def __init__(self, config, *_args, **_kwargs):
        self.mm_max_toks_per_item = {"image": 576}
        self.encoder_compute_budget, self.encoder_cache_size = compute_mm_encoder_budget(
            config.scheduler_config, self.mm_max_toks_per_item
        )


module.MultiModalBudget = _Budget

if os.environ.get("PKV_SUITE", "ours") != "stock":
    import vllm.v1.core.sched.async_scheduler as async_module
    from persistentkv.vllm.scheduler import (
        PersistentKVScheduler,
        PersistentKVSyncScheduler,
    )

    module.Scheduler = PersistentKVSyncScheduler
    async_module.AsyncScheduler = PersistentKVScheduler
