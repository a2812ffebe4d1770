"""Chat templates that no tenant should bring: they take time or memory without end, read files, or are no templates."""

from __future__ import annotations

FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    FOREVER,
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' * 10**9 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for i in range(9) %}{{ 'a' * 10**7 }}{% endfor %}",
    "{{ '%0999999999d' % 1 }}",
    "{{ messages[0].content | center(999999999) }}",
    "{% set a = [0] * 999999999 %}",
    "{{ 1 // 0 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (cycler | attr('__init__')).__globals__.os }}",
    "{% for %}",
]
