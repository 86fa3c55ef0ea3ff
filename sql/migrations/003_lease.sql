-- Who is compacting a chat now, and from when on it may be tried again. One row a chat that was ever compacted.
create table pycontext.lease (
    chat_id text collate "C" not null,
    tenant text collate "C" not null default '',
    holder text,
    taken_at timestamptz,
    expires_at timestamptz,
    lapses integer not null default 0,
    failures integer not null default 0,
    retry_at timestamptz,
    constraint lease_pk primary key (chat_id),
    constraint lease_chat_fk foreign key (chat_id) references pycontext.chat (chat_id),
    constraint lease_held_ck check ((holder is null) = (expires_at is null))
) with (fillfactor = 70);
