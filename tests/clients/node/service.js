// A chat service without Python: one statement starts a turn, one keeps the reply, errors are told by SQLSTATE.
// node service.js native CHAT TEXT | adopted CHAT TEXT     (DATABASE_URL, PGHOST … as usual)
import pg from "pg";

const [home, chat, text] = process.argv.slice(2);
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();

const reply = (messages) => `You said: ${messages.at(-1).content}`; // your model

async function turn() {
  let message = JSON.stringify({ role: "user", content: text }); // as it is, pg would not send it as JSON
  let request = null;
  if (home === "adopted") {
    // The product writes its own table; pycontext reads it where it is, and answers the row of that id.
    const say = "insert into app.message (conversation_id, sender, body) values ($1, 'customer', $2) returning id";
    request = (await client.query(say, [chat, text])).rows[0].id; // a bigint comes as text: it may be above 2^53
    message = null;
  }
  const started = await client.query(
    "select messages, window_tokens, token_budget from pycontext.start_turn($1, $2::jsonb, request_id => $3)",
    [chat, message, request],
  );
  const { messages, window_tokens, token_budget } = started.rows[0];
  const answer = reply(messages);
  if (home === "adopted") {
    await client.query("insert into app.message (conversation_id, sender, body) values ($1, 'bot', $2)", [chat, answer]);
  } else {
    await client.query("select pycontext.append_message($1, 'assistant', $2::text)", [chat, answer]);
  }
  return { answer, messages: messages.length, window_tokens, token_budget };
}

async function refused() {
  try {
    if (home === "adopted") {
      await client.query("select pycontext.append_message($1, 'user', $2::text)", [chat, text]);
    } else {
      await client.query("select * from pycontext.working_window($1::text)", ["no such chat"]);
    }
  } catch (error) {
    return { code: error.code, hint: error.hint };
  }
}

console.log(JSON.stringify({ ...(await turn()), refused: await refused() }));
await client.end();
