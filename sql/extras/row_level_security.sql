-- Tenant isolation: a session sees and writes only rows of the tenant it has named. Run by the owner of the schema,
-- after each install (a new table is open until then); harmless to run again. Per request, in its transaction:
--
--     select set_config('pycontext.tenant', 'acme', true);
--
-- * The role that installs, and so owns tables, views and functions, must be neither superuser nor BYPASSRLS: acts
--   are SECURITY DEFINER and run as that role, so with such an owner they would reach every tenant. Refused here.
--   It is bound as well (FORCE).
-- * A session that has named no tenant yet sees and writes no rows. Once it has, Postgres leaves '' behind at the end of
--   the transaction, which is the tenant of what was written without one: under this file keep no chats there.
-- * Profiles and sources of the tenant '' are read by all and changed only by a session whose tenant is ''.
-- * What looks over all tenants (status) wants a role with BYPASSRLS that may execute it; acts, whoever calls them, are
--   bound to the tenant that is named, so a worker names each in turn.
-- * An upgrade whose migrations change rows would find none: before it, let the owner run alter table … no force row
--   level security on each table; this file, run after it, forces it again.
-- * Whoever can send SQL of his own can name any tenant: this guards against mistakes of the application.
-- * A table of the product behind a source keeps its own policies; acts read it with the rights of the owner here.

do $$
declare
    v_owner text;
    v_table text;
begin
    select pg_catalog.string_agg(distinct r.rolname, ', ') into v_owner
    from pg_catalog.pg_roles r
    where (r.rolsuper or r.rolbypassrls) and (
        r.oid in (select c.relowner from pg_catalog.pg_class c
            where c.relnamespace = 'pycontext'::pg_catalog.regnamespace)
        or r.oid in (select f.proowner from pg_catalog.pg_proc f
            where f.pronamespace = 'pycontext'::pg_catalog.regnamespace));
    if v_owner is not null then
        raise exception 'row-level security would not bind the owner of schema pycontext'
            using errcode = '55000', detail = 'owned by ' || v_owner || ', superuser or BYPASSRLS',
                hint = 'install as a role without these, or hand it all over: reassign owned, alter … owner to';
    end if;

    for v_table in
        select c.relname
        from pg_catalog.pg_class c
        join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant' and not a.attisdropped
        where c.relnamespace = 'pycontext'::pg_catalog.regnamespace and c.relkind in ('r', 'p')
        order by c.relname
    loop
        execute pg_catalog.format('alter table pycontext.%I enable row level security', v_table);
        execute pg_catalog.format('alter table pycontext.%I force row level security', v_table);
        execute pg_catalog.format('drop policy if exists tenant_isolation on pycontext.%I', v_table);
        execute pg_catalog.format('create policy tenant_isolation on pycontext.%I '
            'using (tenant = pg_catalog.current_setting(''pycontext.tenant'', true)) '
            'with check (tenant = pg_catalog.current_setting(''pycontext.tenant'', true))', v_table);
    end loop;

    foreach v_table in array array['profile', 'source'] loop
        execute pg_catalog.format('drop policy if exists shared_by_all on pycontext.%I', v_table);
        execute pg_catalog.format('create policy shared_by_all on pycontext.%I for select using (tenant = '''')', v_table);
    end loop;
end
$$;
