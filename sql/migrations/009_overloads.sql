-- These take more arguments now.
drop function if exists pycontext._anthropic_of(pycontext.window_row[], text, integer[]);
drop function if exists pycontext._responses_of(pycontext.window_row[], text, boolean);
drop function if exists pycontext._memory_text(text, text, real[]);
drop function if exists pycontext.start_turn(
    text, jsonb, integer, integer, text, text, text, text, real[], text, boolean);
