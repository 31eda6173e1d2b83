// On the page about error messages: shows those that a pasted message may be.
//
// A message on the page has "..." where a number or a name of the program stood, so it is
// compared by its words. It fits if most of its words are in what was pasted, and the one
// with the most of them fits best.
(() => {
  const field = document.getElementById("error-message");
  if (!field) return;
  const found = document.getElementById("error-message-found");
  const wordsOf = (text) => new Set(text.match(/[A-Za-z]{2,}/g) || []);
  const messages = [...document.querySelectorAll("article li")]
    .filter((item) => item.querySelector("strong"))
    .map((item) => ({ item, words: wordsOf(item.textContent) }));

  field.addEventListener("input", () => {
    const pasted = wordsOf(field.value);
    const fitting = messages
      .map(({ item, words }) => {
        const common = [...words].filter((word) => pasted.has(word)).length;
        return { item, common, share: common / words.size };
      })
      .filter(({ common, share }) => common > 2 && share > 0.75)
      .sort((a, b) => b.common - a.common)
      .filter(({ common }, _, [best]) => common > best.common / 2);
    found.replaceChildren();
    if (pasted.size > 3 && !fitting.length) {
      found.append("None of these: it may only say what an argument must be.");
    }
    for (const { item } of fitting.slice(0, 3)) {
      const heading = item.parentElement.previousElementSibling;
      const entry = document.createElement("span");
      entry.innerHTML = item.innerHTML;
      // "See ...", which stands below the heading of the group.
      const see = document.createElement("span");
      see.innerHTML = " " + heading.innerHTML;
      entry.append(see, document.createElement("br"));
      found.append(entry);
    }
  });
})();
