/* Search without a server: browsers start no Worker for a file:// page, so its script runs in a hidden frame instead.
   The offline plugin (mkdocs.yml) would otherwise load https://unpkg.com/iframe-worker, which does the same. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.loaded = new Promise(resolve => (this.frame.onload = resolve))
      document.body.appendChild(this.frame)
      addEventListener("message", event => {
        if (event.source === this.frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", {data: event.data}))
      })
      const page = this.frame.contentDocument
      page.open()
      page.write(
        "<body><script>postMessage = data => parent.postMessage(data, '*')</" + "script>" +
        `<script src="${url}"></` + "script></body>")
      page.close()
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
