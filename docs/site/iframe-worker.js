// A page that is opened as a file may start no Worker. The search's worker then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const page = this.inside.document
      this.ready = new Promise((done, failed) => {
        const script = page.createElement("script")
        script.onload = done
        script.onerror = () => failed(new Error(`${script.src} cannot be loaded`))
        script.src = new URL(address, location).href
        page.documentElement.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
