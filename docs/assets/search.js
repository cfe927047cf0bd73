/* The search takes `-`, `+`, `:`, `^` and `~` for operators, and each word for a beginning. What is
   pasted has them by chance, and its words are whole: only the last one may go on. */
(() => {
  const QUERY = 2;
  const post = Worker.prototype.postMessage;
  const plain = (text) => {
    // Of a long traceback the end, which has the error.
    const found = [...new Set(text.match(/[\p{L}\p{N}]+/gu))].slice(-200);
    const field = found.length < 4 ? "" : "text:";
    const asked = found.map((word) => `${field}${word}^1`);
    return [...asked, ...found.slice(-1).map((word) => field + word)].join(" ");
  };
  Worker.prototype.postMessage = function (message, ...rest) {
    const asks = message && message.type === QUERY;
    return post.call(this, asks ? { ...message, data: plain(message.data) } : message, ...rest);
  };
})();
