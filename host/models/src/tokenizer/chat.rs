//! Conversations as text, by the template a model is published with.
//!
//! Templates are Jinja for Python; what they use of it is given here: string methods, `raise_exception`,
//! `strftime_now` (which gives no date: a text must not depend on the day), `tojson`. A template is somebody else's
//! program, so it may use only so much fuel.

use std::io;
use std::path::Path;

use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::Value;
use structures_graph::regular;

use crate::checkpoint::read_json_object;
use crate::ModelError;

/// Steps a template may take: the longest published ones take a few thousand for ten messages.
const FUEL: u64 = 5_000_000;

/// Bytes of a template's own file: the longest published ones have 30 KB.
const MAX_TEMPLATE: u64 = 16 << 20;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// The template of a directory: `tokenizer_config.json` holds one or a list of named ones; a file of its own is newer.
pub(super) fn template(dir: &Path) -> Result<Option<String>, ModelError> {
    let own = dir.join("chat_template.jinja");
    if own.exists() {
        let failed = |e| ModelError::io(&own, "read it", e, "get the file again");
        let bad = |text: String| failed(io::Error::new(io::ErrorKind::InvalidData, text));
        let bytes = regular::read(&own, MAX_TEMPLATE)
            .map_err(failed)?
            .map_err(|n| bad(format!("expected at most {MAX_TEMPLATE} bytes, found {n}")))?;
        let text = String::from_utf8(bytes).map_err(|e| bad(e.to_string()))?;
        return Ok(Some(text));
    }
    let config = dir.join("tokenizer_config.json");
    if !config.exists() {
        return Ok(None);
    }
    let map = read_json_object(&config)?;
    let named = |list: &Vec<Value>| {
        let entry = list
            .iter()
            .find(|e| e.get("name").and_then(Value::as_str) == Some("default"));
        entry?.get("template")?.as_str().map(String::from)
    };
    Ok(match map.get("chat_template") {
        Some(Value::String(s)) => Some(s.clone()),
        Some(Value::Array(list)) => named(list),
        _ => None,
    })
}

/// The text of a conversation.
pub(super) fn render(
    template: &str,
    messages: &[Message],
    open_answer: bool,
    bos: &str,
    eos: &str,
) -> Result<String, String> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    // As the published implementation sets it.
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |why: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, why))
    });
    env.add_function("strftime_now", |_: String| String::new());
    let rendered = env.render_str(
        template,
        minijinja::context! {
            messages,
            add_generation_prompt => open_answer,
            bos_token => bos,
            eos_token => eos,
            tools => (),
            documents => (),
        },
    );
    rendered.map_err(|e| {
        let at = e.line().map(|line| format!(" (line {line})"));
        let detail = e
            .detail()
            .map(String::from)
            .unwrap_or_else(|| e.kind().to_string());
        format!("{detail}{}", at.unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk() -> Vec<Message> {
        vec![
            Message::new("system", " Be brief. "),
            Message::new("user", "Hi"),
            Message::new("assistant", "Hello"),
        ]
    }

    #[test]
    fn published_shapes_of_templates_render() {
        let tags = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
        let got = render(tags, &talk()[1..2], true, "", "").unwrap();
        assert_eq!(
            got,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );

        let first = "{{- bos_token }}\n{%- if messages[0].role == 'system' %}\n  {%- set first = messages[0].content.strip() %}\n  {%- set rest = messages[1:] %}\n{%- else %}\n  {%- set first = '' %}\n  {%- set rest = messages %}\n{%- endif %}\n{%- for m in rest %}\n{{- '[' ~ loop.index0 ~ ']' ~ m.content.upper() ~ (eos_token if loop.last else '') }}\n{%- endfor %}\n{{- '|' ~ first }}";
        let got = render(first, &talk(), false, "<s>", "</s>").unwrap();
        assert_eq!(got, "<s>[0]HI[1]HELLO</s>|Be brief.");
        // Blocks leave no lines behind.
        let blocks = "{% if tools is defined and tools %}\nno\n{% endif %}\n{% for m in messages %}\n{{ m | tojson }}\n{% endfor %}\n";
        let got = render(blocks, &talk()[1..2], false, "", "").unwrap();
        assert_eq!(
            got.replace(' ', ""),
            "{\"role\":\"user\",\"content\":\"Hi\"}\n"
        );
    }

    #[test]
    fn a_template_that_refuses_or_never_ends_is_a_reason() {
        let refuses = "{{ raise_exception('roles must alternate') }}";
        let why = render(refuses, &talk(), false, "", "").unwrap_err();
        assert!(why.contains("roles must alternate"), "{why}");
        let loops = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        let why = render(loops, &talk(), false, "", "").unwrap_err();
        assert!(why.contains("fuel"), "{why}");
        assert!(render("{% if", &talk(), false, "", "").is_err());
    }
}
