-- What a turn kept free for counts above the chat's totals: its replay keeps the same.
alter table pycontext.message add column read_excess integer;
