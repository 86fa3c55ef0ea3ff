-- A fact of an adopted chat goes with the row it cites, which nobody but the product changes.
alter table pycontext.fact add column body_hash bigint;

-- It takes fewer arguments now.
drop function if exists pycontext._erase_embeddings(text, bigint, bigint, text);
