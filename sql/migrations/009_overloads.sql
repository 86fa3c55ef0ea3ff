-- These take more arguments now.
drop function if exists pycontext._anthropic_of(pycontext.window_row[], text, integer[]);
drop function if exists pycontext._responses_of(pycontext.window_row[], text, boolean);
