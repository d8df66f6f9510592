"""A tiny checkpoint with random weights: loads in a blink, in this engine and in transformers alike.

`python -m support.tiny_model DIR` writes one. The weights say nothing sensible, but the same prompt always gives the
same tokens, so that cold and warm answers can be compared.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 2, 64, 4, 2, 128, 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
# Whole words, so that some tokens have several characters; all else is bytes.
WORDS = re.findall(
    r"\w+",
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so what up said about "
    "other into than its time only could new them man some these then two first may any like now my such make over",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Writes config.json, model.safetensors and the tokenizer's files into `directory`, and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64  # padded, as many real checkpoints are
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(SPECIAL[0]),
        "eos_token_id": eos,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(directory / "config.json", config)
    _write(directory / "tokenizer_config.json", settings)
    _write(directory / "generation_config.json", {"eos_token_id": eos})
    weights = directory / "model.safetensors"
    save_file(_weights(tokenizer.get_vocab_size(), vocabulary, seed), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # written for the owner alone; a pod's user must read it too
    return directory


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE, built and not trained: every byte, the merges of WORDS with and without a leading space,
    special tokens last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    merges = []
    for word in [*("\u0120" + word for word in WORDS), *WORDS]:  # U+0120 stands for the space
        built = word[0]
        for character in word[1:]:
            if built + character not in vocabulary:
                vocabulary[built + character] = len(vocabulary)
                merges.append((built, character))
            built += character
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _weights(tokens: int, vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Wide enough that logits differ clearly: a tie would make greedy answers depend on rounding."""
    draw = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": draw.standard_normal((vocabulary, HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(vocabulary, HIDDEN),
    }
    weights["lm_head.weight"][tokens:] = 0  # padding is never the likeliest
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights


def _write(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]))
