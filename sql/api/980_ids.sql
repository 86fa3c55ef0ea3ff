-- Every public function of a chat takes its id as the product has it: bigint, uuid, integer. An overload each that hands it on
-- as text; text itself, and a literal, go straight to the function. Each runs with its caller's rights: how a type becomes text
-- is for whoever made the type to say. Run again where functions are added (extras).
create or replace function pycontext._accept_ids()
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    f record;
begin
    for f in
        select p.proname as name, regexp_replace(pg_get_function_arguments(p.oid), '^chat_id text', 'chat_id anyelement') as arguments,
            pg_get_function_result(p.oid) as result, p.proretset,
            case p.provolatile when 'v' then 'volatile' when 's' then 'stable' else 'immutable' end as volatility,
            (select string_agg(case n.place when 1 then 'chat_id::text' else quote_ident(n.name) end, ', ' order by n.place)
            from unnest(p.proargnames[:p.pronargs]) with ordinality n (name, place)) as given,
            p.oid::regprocedure::text as signature
        from pg_proc p
        where p.pronamespace = 'pycontext'::regnamespace and p.proname !~ '^_' and p.proargnames[1] = 'chat_id'
            and p.proargtypes[0] = 'text'::regtype
    loop
        execute format('create or replace function pycontext.%I(%s) returns %s language sql %s '
            'set search_path = pg_catalog, pg_temp as %L', f.name, f.arguments, f.result, f.volatility,
            case when f.proretset then 'select * from ' else 'select ' end || format('pycontext.%I(%s)', f.name, f.given));
        f.signature := regexp_replace(f.signature, '[(]text', '(anyelement');
        execute format('comment on function %s is %L', f.signature,
            format('%s for a chat id of any type, which is taken as text.', f.name));
        execute format('revoke execute on function %s from public', f.signature);
    end loop;
end
$$;

comment on function pycontext._accept_ids() is
    'Private. Makes the overloads by which functions take a chat id of any type.';

select pycontext._accept_ids();
