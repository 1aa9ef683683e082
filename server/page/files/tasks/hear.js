// Recordings, from files or from the microphone: what is said in them, as it comes.

import { events } from "../api.js";
import { announce, byId, element, toast } from "../dom.js";
import { model } from "../models.js";

/** Shows the text in `output` while it comes. */
export async function transcribe(output) {
  const form = new FormData(), text = element("p", { class: "words" });
  form.append("model", model());
  form.append("stream", "true");
  form.append("file", byId("recording").files[0]);
  output.replaceChildren(text);
  for await (const event of events("v1/audio/transcriptions", form)) text.append(event.delta ?? "");
  return [text.textContent ? text : element("p", { class: "help", text: "Nothing is said there." })];
}

/** A button that records until it is pressed again; none where the browser gives no microphone, as without TLS. */
export function recordButton() {
  if (!(navigator.mediaDevices && window.MediaRecorder)) return [];
  let recorder = null;
  const stop = () => recorder?.stop();
  const button = element("button", { type: "button", text: "Record", onclick: () => (recorder ? stop() : record()) });

  async function record() {
    let sound;
    try { sound = await navigator.mediaDevices.getUserMedia({ audio: true }); } catch (error) { return toast(`There is no microphone: ${error.message}`); }
    const parts = [];
    recorder = new MediaRecorder(sound);
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = () => {
      for (const track of sound.getTracks()) track.stop();
      recorder = null;
      button.textContent = "Record";
      if (button.checkVisibility()) heard(parts);  // nobody waits for it in another view
    };
    recorder.start();
    button.textContent = "Stop and transcribe";
    announce("Recording");
    addEventListener("hashchange", stop, { once: true });
  }

  return [button];
}

function heard(parts) {
  const list = new DataTransfer();
  list.items.add(new File(parts, "recording", { type: parts[0]?.type }));
  byId("recording").files = list.files;
  byId("ask").requestSubmit();
}
