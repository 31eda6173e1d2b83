// On Troubleshooting: shows which messages of the package a pasted one may be.
//
// A message has "..." where a number or a name of the program stood, so it is compared by
// its words. It fits if most of its words are in the pasted text, and the one with the most
// of them fits best. The messages are those of error-messages-data.js.
(() => {
  const field = document.getElementById("error-message");
  const found = document.getElementById("error-message-found");
  const wordsOf = (text) => new Set(text.match(/[A-Za-z]{2,}/g) || []);
  const all = window.kerasLsoMessages.flatMap(({ see, messages }) =>
    messages.map((text) => ({ text, see, words: wordsOf(text) })),
  );

  const fitting = (pasted) =>
    all
      .map((message) => {
        const common = [...message.words].filter((word) => pasted.has(word)).length;
        return { ...message, common, share: common / message.words.size };
      })
      .filter(({ common, share }) => common > 2 && share > 0.75)
      .sort((a, b) => b.common - a.common)
      .filter(({ common }, _, [best]) => common > best.common / 2)
      .slice(0, 3);

  field.addEventListener("input", () => {
    const pasted = wordsOf(field.value);
    const entries = fitting(pasted);
    found.replaceChildren();
    if (pasted.size > 3 && !entries.length) {
      found.append("None of these: it may only say what an argument must be.");
    }
    for (const { text, see } of entries) {
      const entry = document.createElement("span");
      entry.append(text, " See ");
      Object.entries(see).forEach(([title, href], i) => {
        const link = document.createElement("a");
        Object.assign(link, { href, textContent: title });
        entry.append(i ? " and " : "", link);
      });
      entry.append(".", document.createElement("br"));
      found.append(entry);
    }
  });
})();
