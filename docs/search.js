// A query such as --net-interface: leading hyphens would exclude the word. Its parts are looked up in texts, not in
// titles, and required, except for those of two letters, which may be stop words that are not in the index.
const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = typeof message?.data === "string"
  post.call(this, isQuery ? {...message, data: message.data.replace(/(?<!\S)-\S*/g, ofOption)} : message, ...rest)
}

function ofOption(option) {
  const parts = option.split("-").filter(Boolean)
  return parts.map((part, i) => (part.length > 2 ? "+" : "") + `text:${part}` + (i + 1 < parts.length ? "" : "*")).join(" ")
}
