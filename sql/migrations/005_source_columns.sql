-- What a product's relation offers, looked up once when it is registered: types to cast an id to, the type of order_at
-- where seq is made of a time, and which optional columns there are.
alter table pycontext.source
    add column chat_type text,
    add column message_type text,
    add column order_type text,
    add column has_columns text[];

-- What a read needs to know of a product's row, kept beside its count. body_hash says whether the row still reads as
-- it did when it was counted.
alter table pycontext.token_count
    add column body_hash bigint,
    add column reasoning_tokens integer,
    add column images smallint,
    add column has_fence boolean,
    add column is_plain boolean;
