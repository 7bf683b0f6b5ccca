"""Tiny random policies of the four supported families, saved as ordinary local model folders.

The classes, the chat template's form and the image processor are the real ones; only sizes and weights are not.
A default-initialised tiny model has a nearly uniform softmax and greedily emits one token for ever; wrong positions,
masks or temperatures then pass every comparison. So the matrices are scaled up, the output head most, and not tied to
the embedding, which would make each token its own successor.
"""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

IM_END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", IM_END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>"]  # added tokens that skip_special_tokens does not know

CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{% else %}{%- for item in message.content %}"
    "{%- if item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item.text }}{% endif %}"
    "{%- endfor %}{% endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{%- else %}<think>\n{% endif %}{% endif %}"
).replace("\n", "{{ '\\n' }}")


def make_tokenizer():
    """One token a byte, so any text can be written, and the family's added tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=IM_END, pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def text_sizes(hidden, layers):
    return dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=8192)


def model_config(family, ids, vocab_size, hidden=64, layers=4):
    """A tiny config of `family`: qwen3_5, qwen3_vl, qwen2_5_vl or qwen2_vl."""
    text = text_sizes(hidden, layers) | dict(vocab_size=vocab_size, tie_word_embeddings=False,
                                             eos_token_id=ids["<|endoftext|>"])
    tokens = dict(image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
                  vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
                  tie_word_embeddings=False)
    if family == "qwen3_5":
        text |= dict(head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                     linear_num_value_heads=4, full_attention_interval=2,
                     rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1],
                                          mrope_interleaved=True, partial_rotary_factor=0.25))
        vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=hidden,
                      num_position_embeddings=64, patch_size=16)
    elif family == "qwen3_vl":
        text |= dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2],
                                                       mrope_interleaved=True))
        vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=hidden,
                      num_position_embeddings=64, patch_size=16, deepstack_visual_indexes=[0, 1])
    else:
        text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2]),
                     bos_token_id=ids["<|endoftext|>"])
        vision = dict(depth=2, num_heads=2, patch_size=14)
        if family == "qwen2_5_vl":
            vision |= dict(hidden_size=32, intermediate_size=64, out_hidden_size=hidden, fullatt_block_indexes=[1],
                           window_size=112)
        else:
            vision |= dict(embed_dim=32, hidden_size=hidden, mlp_ratio=2)
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **tokens)


def make_policy_folder(folder, family="qwen3_5", seed=0, hidden=64, layers=4, min_pixels=3136,
                       max_pixels=16777216):
    """Writes a tiny policy of `family` to `folder` (str or Path) and returns the folder."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    config = model_config(family, ids, len(tokenizer), hidden, layers)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "visual" not in name:
                weight.mul_(10 if "lm_head" in name else 4 if family == "qwen3_5" else 8)
    model.generation_config.update(do_sample=True, top_k=20, top_p=0.95, temperature=1.0,
                                   eos_token_id=[ids[IM_END], ids["<|endoftext|>"]],
                                   pad_token_id=ids["<|endoftext|>"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_image_processor(folder, config.vision_config.patch_size, min_pixels, max_pixels)
    return folder


def write_image_processor(folder, patch_size=16, min_pixels=65536, max_pixels=16777216):
    """Writes `preprocessor_config.json`; the default sizes are the real policy's."""
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": patch_size, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
