// A query such as --net-interface: leading dashes would exclude the word.
document.addEventListener("input", ({target}) => {
  if (target.matches?.(".md-search__input")) target.value = target.value.replace(/(^|\s)-+/g, "$1")
}, true)
