// The lab's Python beside the page, so that controls move while it computes. Of questions that arrive meanwhile only
// the latest is answered; what takes longer than an answer follows when no control has moved for a moment.
const MOMENT_MS = 120, REST_MS = 250;
let lab = null, another = null, toCome = [], latest = null, busy = false, wake = null;

// Counts what is fetched until Python is ready; Pyodide itself reports nothing.
function counting(plain) {
  let bytes = 0;
  return async (...asked) => {
    const answer = await plain(...asked);
    if (!answer.ok || !answer.body) return answer;
    const count = new TransformStream({ transform(piece, passed) {
      bytes += piece.byteLength;
      postMessage({ bytes });
      passed.enqueue(piece);
    } });
    return new Response(answer.body.pipeThrough(count), { status: answer.status, headers: answer.headers });
  };
}

async function start({ pyodide, sources }) {
  const plain = self.fetch.bind(self);
  self.fetch = counting(plain);
  try {
    const archive = fetch(sources).then((answer) => {
      if (!answer.ok) throw new Error(`${sources}: ${answer.status}`);
      return answer.arrayBuffer();
    });
    const { loadPyodide } = await import(`${pyodide}pyodide.mjs`);
    const [python, zipped] = await Promise.all([loadPyodide({ indexURL: pyodide }), archive]);
    python.unpackArchive(zipped, "zip");
    python.runPython("from fsdplab.figures.lab.page import PageLab, questions_to_come");
    lab = python.runPython("PageLab()");
    another = () => python.runPython("PageLab()");
    toCome = python.runPython("questions_to_come()").toJs();
  } finally {
    self.fetch = plain;
  }
}

// Lets questions arrive that were sent meanwhile, and ends with the first.
const pause = (ms) => new Promise((done) => {
  wake = done;
  setTimeout(done, ms);
});

async function answerLatest() {
  if (!lab || busy) return;
  busy = true;
  try {
    while (latest !== null) {
      const asked = latest;
      latest = null;
      postMessage({ values: lab.answer(asked) });
      await pause(MOMENT_MS);
      if (latest === null) postMessage({ values: lab.afterwards(), last: true });
      await pause(0);
    }
  } finally {
    busy = false;
  }
}

// While no control moves: what a run takes is kept, so that these questions are answered quickly when they come.
async function answerBeforehand() {
  const rested = async () => {
    do await pause(REST_MS); while (busy);
  };
  for (const question of toCome) {
    const beforehand = another();
    await rested();
    beforehand.answer(question);
    await rested();
    beforehand.afterwards();
    beforehand.destroy();
  }
}

self.onmessage = async ({ data }) => {
  try {
    if (data.asked) {
      latest = data.asked;
      wake?.();
    } else {
      await start(data);
      postMessage({ ready: true });
    }
    await answerLatest();
    if (!data.asked) await answerBeforehand();
  } catch (error) {
    postMessage({ failed: String(error?.message || error || "no reason was given").trim().split("\n").at(-1) });
  }
};
