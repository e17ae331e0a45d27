"""Small random models that look at pictures, with the processors that a server reads them by; all made offline."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
)

from tests.character_model import CHARACTERS
from tests.models import SIZES

PLAIN_TOKENS = ("<pad>", "<bos>", "<eos>")
CONTEXT = SIZES["max_position_embeddings"]
WIDTH = 128
SPREAD = SIZES["initializer_range"]

TEXT = dict(
    vocab_size=SIZES["vocab_size"],
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=CONTEXT,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=SPREAD,
)
"""The language models: 4 heads of dimension 16."""

VISION = dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=4, initializer_range=SPREAD)
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MROPE = ROPE | {"mrope_section": [2, 3, 3]}
QWEN_TEXT = TEXT | {"rope_parameters": MROPE}

QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

# As many taps of the vision model as SGLang's MoE model adds to the first layers, whatever the config says.
QWEN3_VISION = VISION | dict(
    depth=3, out_hidden_size=WIDTH, num_position_embeddings=256, deepstack_visual_indexes=[0, 1, 2]
)
QWEN3_TEXT = TEXT | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}}
QWEN3_PATCHES = dict(patch_size=16, temporal_patch_size=2, merge_size=2)


@dataclass(frozen=True)
class VisionModel:
    """A model of Hugging Face with its processor; `picture` is what stands for a picture in a prompt."""

    model: Any
    processor: Any
    picture: str
    turned_experts: bool = False
    """Whether published checkpoints, which SGLang reads, have the experts' matrices the other way round."""

    def save(self, folder: Path) -> Path:
        """Write what a server loads."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        if self.turned_experts:
            path = folder / "model.safetensors"
            turned = {n: w.mT.contiguous() if ".experts." in n else w for n, w in load_file(path).items()}
            save_file(turned, path, {"format": "pt"})
        return folder

    def prompt(self, before: str, after: str) -> str:
        return before + self.picture + after

    @torch.no_grad()
    def answer(self, prompt: str, picture: Image.Image, new: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Greedy decoding of `new` tokens by Hugging Face.

        Returns:
            The new tokens; float32 logprobs of all tokens but the first, those of the prompt and the new ones; and for
            each of these whether both it and the token before it are text.
        """
        inputs = dict(self.processor(text=[prompt], images=[picture], return_tensors="pt"))
        sequence = self.model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        inputs |= {"input_ids": sequence, "attention_mask": torch.ones_like(sequence)}
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, new))
        logprobs = self.model(**inputs).logits[0, :-1].float().log_softmax(dim=-1)
        tokens = sequence[0]
        text = tokens >= len(self.processor.tokenizer) - len(CHARACTERS)
        text[-new:] = True
        found = logprobs.gather(1, tokens[1:, None])[:, 0]
        return tokens[-new:].tolist(), found.numpy(), (text[1:] & text[:-1]).numpy()


def picture(seed: int, size: int = 224) -> Image.Image:
    """An RGB picture of size x size pixels, a gradient with shapes; another one for every seed below 40."""
    image = Image.linear_gradient("L").resize((size, size)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for number in range(6):
        left, top = (37 * number + 53 * seed) % (size - 40), (71 * number + 29 * seed) % (size - 40)
        color = ((80 * number + 40 * seed) % 256, (150 * number + 70 * seed) % 256, (60 * seed) % 256)
        (draw.ellipse if number % 2 else draw.rectangle)((left, top, left + 36, top + 28), fill=color)
    return image


def data_url(image: Image.Image) -> str:
    """The picture as a client sends it."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def make_qwen2_vl() -> VisionModel:
    tokenizer = _tokenizer(QWEN_TOKENS)
    vision = dict(depth=2, embed_dim=64, num_heads=4, mlp_ratio=2, hidden_size=WIDTH, in_chans=3)
    config = Qwen2VLConfig(
        text_config=QWEN_TEXT, vision_config=vision | {"initializer_range": SPREAD}, **_ids(tokenizer, QWEN_TOKENS)
    )
    return _vision_model(Qwen2VLForConditionalGeneration, config, _qwen(Qwen2VLProcessor, tokenizer), QWEN_PICTURE)


def make_qwen2_5_vl() -> VisionModel:
    tokenizer = _tokenizer(QWEN_TOKENS)
    vision = VISION | dict(out_hidden_size=WIDTH, fullatt_block_indexes=[1])
    config = Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=vision, **_ids(tokenizer, QWEN_TOKENS))
    processor = _qwen(Qwen2_5_VLProcessor, tokenizer)
    return _vision_model(Qwen2_5_VLForConditionalGeneration, config, processor, QWEN_PICTURE)


def make_qwen3_vl() -> VisionModel:
    tokenizer = _tokenizer(QWEN_TOKENS)
    config = Qwen3VLConfig(text_config=QWEN3_TEXT, vision_config=QWEN3_VISION, **_ids(tokenizer, QWEN_TOKENS))
    processor = _qwen(Qwen3VLProcessor, tokenizer, **QWEN3_PATCHES)
    return _vision_model(Qwen3VLForConditionalGeneration, config, processor, QWEN_PICTURE)


def make_qwen3_vl_moe() -> VisionModel:
    tokenizer = _tokenizer(QWEN_TOKENS)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[])
    config = Qwen3VLMoeConfig(
        text_config=QWEN3_TEXT | experts, vision_config=QWEN3_VISION, **_ids(tokenizer, QWEN_TOKENS)
    )
    processor = _qwen(Qwen3VLProcessor, tokenizer, **QWEN3_PATCHES)
    return _vision_model(Qwen3VLMoeForConditionalGeneration, config, processor, QWEN_PICTURE, turned_experts=True)


def make_mistral3() -> VisionModel:
    tokens = {"image_token_index": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"}
    tokenizer = _tokenizer(tokens)
    patches = dict(image_size=224, patch_size=14)
    vision = dict(model_type="pixtral", num_hidden_layers=2, num_attention_heads=4, head_dim=16, hidden_act="silu")
    sizes = dict(hidden_size=64, intermediate_size=64, initializer_range=SPREAD, rope_parameters=dict(ROPE))
    config = Mistral3Config(
        text_config=TEXT | dict(model_type="mistral", head_dim=16, sliding_window=None, rope_parameters=dict(ROPE)),
        vision_config=vision | sizes | patches,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    pixels = PixtralImageProcessor(size={"longest_edge": 224}, patch_size={"height": 14, "width": 14})
    processor = PixtralProcessor(image_processor=pixels, tokenizer=tokenizer, patch_size=14, spatial_merge_size=2)
    return _vision_model(Mistral3ForConditionalGeneration, config, processor, "[IMG]")


def make_glm4v() -> VisionModel:
    tokens = {
        **{"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        **{"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"},
        **{"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"},
    }
    tokenizer = _tokenizer(tokens)
    config = Glm4vConfig(
        text_config=TEXT | dict(head_dim=16, pad_token_id=0, rope_parameters=MROPE | {"partial_rotary_factor": 1.0}),
        # Half the spread: sums of larger terms differ between programs by more than the tests allow.
        vision_config=VISION
        | dict(initializer_range=0.1, intermediate_size=128, out_hidden_size=WIDTH, image_size=224),
        **_ids(tokenizer, tokens),
    )
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(), tokenizer=tokenizer, video_processor=Glm4vVideoProcessor()
    )
    return _vision_model(
        Glm4vForConditionalGeneration, config, processor, "<|begin_of_image|><|image|><|end_of_image|>"
    )


MAKERS: dict[str, Callable[[], VisionModel]] = {
    "qwen2.5-vl": make_qwen2_5_vl,
    "qwen2-vl": make_qwen2_vl,
    "qwen3-vl": make_qwen3_vl,
    "qwen3-vl-moe": make_qwen3_vl_moe,
    "mistral3": make_mistral3,
    "glm4v": make_glm4v,
}


def _vision_model(model_class: type, config: Any, processor: Any, picture: str, **more: bool) -> VisionModel:
    torch.manual_seed(0)
    return VisionModel(model_class(config).to(torch.float32).eval(), processor, picture, **more)


def _qwen(kind: type, tokenizer: PreTrainedTokenizerFast, **patches: int) -> Any:
    pictures, films = Qwen2VLImageProcessor(**patches), Qwen2VLVideoProcessor(**patches)
    return kind(image_processor=pictures, tokenizer=tokenizer, video_processor=films)


def _ids(tokenizer: PreTrainedTokenizerFast, tokens: dict[str, str]) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _tokenizer(special: dict[str, str]) -> PreTrainedTokenizerFast:
    """One token for each of the special ones and for each character, the characters last."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    apart = (*PLAIN_TOKENS, *special.values())
    vocabulary = {token: number for number, token in enumerate((*apart, *spelled))}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<pad>"))
    characters.pre_tokenizer = byte_level
    characters.decoder = decoders.ByteLevel()
    characters.add_special_tokens([AddedToken(token, normalized=False) for token in apart])
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
