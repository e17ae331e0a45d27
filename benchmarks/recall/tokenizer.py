"""The recall model's tokenizer: one token per whitespace-separated word, a chat template that is the training format.

The template is prefix-stable: a conversation rendered one turn later extends the ids of the earlier prompt, the answer
and <eos>. A system message is plain text between <bos> and the first <user>.
"""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.recall import task

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '" + task.USER + " ' + message['content'] | trim + ' ' }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{- '" + task.ASSISTANT + " ' + message['content'] | trim + ' ' + eos_token }}"
    "{%- else %}{{- ' ' + message['content'] | trim + ' ' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + task.ASSISTANT + "' }}{%- endif %}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer over ``task.VOCABULARY``, ids in its order; ``max_length`` is the longest context in tokens.

    It adds no special tokens by itself: the template writes <bos>.
    """
    words = Tokenizer(models.WordLevel(dict(task.TOKEN_ID), unk_token=task.UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        additional_special_tokens=[task.USER, task.ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
