"""Model folders of a tiny tokenizer and a chat template, in the manner of families."""

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes <b>exactly</b> & 'quickly', é.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

# Tools in a system message, <tool_response> in a user message, a default system.
QWEN2 = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- else %}
    {%- set system = 'You help.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n<tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}{{ message.content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# The same with a switch for thinking, and the thoughts before the last question gone;
# those behind it are written in one way.
QWEN3 = (
    """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content[:15] == '<tool_response>' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
"""
    + QWEN2.replace(
        "        {%- generation %}{{ message.content }}{% end",
        """\
        {%- set said = message.content %}
        {%- if message.role == 'assistant' and '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
            {%- if loop.index0 > last.question %}
                {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- endif %}
        {%- endif %}
        {%- generation %}{{ said }}{% end""",
    )
    + """
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
)

# Calls in XML, whose values are texts; tools in XML too, by a macro.
CODER = """\
{% macro shown(field) %}
    {%- for key in field if key not in ['name', 'properties'] %}
        {{- '\\n<' ~ key ~ '>' ~ (field[key] | string) ~ '</' ~ key ~ '>' }}
    {%- endfor %}
{% endmacro %}
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- elif tools is iterable and tools | length > 0 %}
    {%- set system = 'You compute.' %}
{%- endif %}
{%- if system is defined %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools is iterable and tools | length > 0 %}
        {{- '\\n\\n<tools>' }}
        {%- for tool in tools %}
            {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
            {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>\\n<parameters>' }}
            {%- for name, field in tool.parameters.properties | items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' ~ shown(field) }}
                {{- '\\n</parameter>' }}
            {%- endfor %}
            {{- '\\n</parameters>\\n</function>' }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\n<tool_call>\\n<function=name>\\n<parameter=a>' }}
        {{- '\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value | tojson if value is mapping else value | string }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# A first token, today's date, tools in the user's message, answers of tools as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- set head, foot = '<|start_header_id|>', '<|end_header_id|>\\n\\n' %}
{{- head + 'system' + foot + 'Today: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools is not none %}
    {{- head + 'user' + foot + 'Answer {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- head + 'assistant' + foot + '{"name": "' + call.name }}
        {{- '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head + 'ipython' + foot + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- head + message.role + foot + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head + 'assistant' + foot }}{% endif %}
"""

# Knows neither tools nor a role for their answers; the lines of its tags leave nothing.
NO_TOOLS = """\
{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role') }}
    {% endif %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_QWEN_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_WORDS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA_MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>")
_LLAMA_MARKS += ("<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

FAMILIES = {
    "qwen2": (QWEN2, _QWEN_MARKS, _QWEN_WORDS[:2], ("<|im_end|>", "<|endoftext|>")),
    "qwen3": (QWEN3, _QWEN_MARKS, _QWEN_WORDS, ("<|im_end|>", "<|endoftext|>")),
    "coder": (CODER, _QWEN_MARKS, _QWEN_WORDS[:2], ("<|im_end|>", "<|endoftext|>")),
    "llama3": (LLAMA3, _LLAMA_MARKS, (), ("<|end_of_text|>", "<|eom_id|>")),
    "no_tools": (NO_TOOLS, _QWEN_MARKS, (), ("<|im_end|>",)),
}


def write(folder, family):
    """Writes a folder without a model; returns it."""
    template, marks, words, ends = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([template] * 2, trainer)
    tokenizer.add_special_tokens([_added(mark, True) for mark in marks])
    tokenizer.add_tokens([_added(word, False) for word in words])
    names = {"eos_token": "<|eot_id|>" if family == "llama3" else "<|im_end|>"}
    if family == "llama3":
        first = names["bos_token"] = marks[0]
        special = [(first, tokenizer.token_to_id(first))]
        # What a tokenizer adds by itself stands in the template already.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=special
        )
    names["pad_token"] = names["eos_token"]
    return save(folder, tokenizer, template, names, ends)


def open_thoughts(folder):
    """Has the template of a written folder begin every turn with a thought."""
    file = folder / "chat_template.jinja"
    opened = "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    file.write_text(file.read_text() + opened)


def toy(folder, words, merges):
    """A folder whose ids 0, 1, 2 ... are these words, then <s> and <e>."""
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([_added("<s>", True), _added("<e>", True)])
    template = (
        "{% for message in messages %}<s>{{ message.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    return save(folder, tokenizer, template, {"eos_token": "<e>", "pad_token": "<e>"})


def save(folder, tokenizer, template, names, ends=()):
    """Writes the files as the libraries do; without ends no generation_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    if ends:
        ids = [tokenizer.token_to_id(end) for end in ends]
        content = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
        (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def _added(text, special):
    return AddedToken(text, special=special, normalized=False)
