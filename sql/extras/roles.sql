-- Three roles, each with all rights of the one before; run by somebody who may create roles, after each install:
--   pycontext_reader  reads: every view, and every function that only looks (they run with the caller's rights,
--                     so it may select from the tables too)
--   pycontext_writer  acts through functions, which need no right on the tables
--   pycontext_admin   changes the tables themselves
-- Then: grant pycontext_writer to your_app;
-- Rights follow from the catalog: what stable and immutable functions do is reading, what volatile ones do is acting.

do $$
declare
    v_role text;
    v_object record;
begin
    perform pg_catalog.pg_advisory_xact_lock(7234015113000001);
    foreach v_role in array array['pycontext_reader', 'pycontext_writer', 'pycontext_admin'] loop
        if not exists (select from pg_catalog.pg_roles r where r.rolname = v_role) then
            execute pg_catalog.format('create role %I nologin', v_role);
        end if;
    end loop;
    if not pg_catalog.pg_has_role('pycontext_writer', 'pycontext_reader', 'usage') then
        grant pycontext_reader to pycontext_writer;
    end if;
    if not pg_catalog.pg_has_role('pycontext_admin', 'pycontext_writer', 'usage') then
        grant pycontext_writer to pycontext_admin;
    end if;
    grant usage on schema pycontext to pycontext_reader;

    for v_object in
        select c.oid::pg_catalog.regclass::text as name, c.relkind
        from pg_catalog.pg_class c
        where c.relnamespace = 'pycontext'::pg_catalog.regnamespace and c.relkind in ('r', 'p', 'v', 'm')
    loop
        execute pg_catalog.format('grant select on %s to pycontext_reader', v_object.name);
        if v_object.relkind in ('r', 'p') then
            execute pg_catalog.format('grant insert, update, delete on %s to pycontext_admin', v_object.name);
        end if;
    end loop;

    -- Private functions too: public ones that read call them with the caller's rights. Limits and sources are the admin's.
    for v_object in
        select f.oid::pg_catalog.regprocedure::text as name, f.provolatile, f.prosecdef, f.proname
        from pg_catalog.pg_proc f
        where f.pronamespace = 'pycontext'::pg_catalog.regnamespace and f.prokind in ('f', 'p')
    loop
        if v_object.provolatile <> 'v' then
            execute pg_catalog.format('grant execute on function %s to pycontext_reader', v_object.name);
        elsif v_object.proname in ('set_profile', 'register_source', 'forget_source', '_learn_source', '_recheck_source',
            '_compile_sources') then
            execute pg_catalog.format('revoke execute on function %s from pycontext_writer', v_object.name);
            execute pg_catalog.format('grant execute on function %s to pycontext_admin', v_object.name);
        elsif v_object.prosecdef or v_object.proname !~ '^_' then
            execute pg_catalog.format('grant execute on function %s to pycontext_writer', v_object.name);
        end if;
    end loop;
end
$$;
