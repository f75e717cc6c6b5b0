//! The C header of the plugin ABI, made from `plugin-api/src/abi.rs` by cbindgen.
//!
//! The header is what a vendor who writes C reads and compiles, so it is generated from the one
//! place that defines the ABI, committed, and compared with a fresh one by a test. This crate owns
//! the C names, the words around the definitions, and the layout that both sides assert: sizes and
//! offsets as the Rust compiler has them, restated for the C compiler to check. It defines no part
//! of the ABI.

mod layout;

use std::path::{Path, PathBuf};

use cbindgen::{Braces, Builder, Config, DocumentationStyle, Language, RenameRule, Style};

use structures_plugin_api::abi::{API_VERSION, C_SYMBOL};

pub use layout::{Layout, LAYOUTS};

/// Rust name, C name. Everything of `abi.rs` that C sees is here; a test compares the two.
pub const NAMES: &[(&str, &str)] = &[
    ("API_MAJOR", "STRUCTURES_API_MAJOR"),
    ("API_MINOR", "STRUCTURES_API_MINOR"),
    ("MAX_RANK", "STRUCTURES_MAX_RANK"),
    ("Status", "structures_status"),
    ("STATUS_OK", "STRUCTURES_STATUS_OK"),
    ("STATUS_INVALID", "STRUCTURES_STATUS_INVALID"),
    ("STATUS_REFUSED", "STRUCTURES_STATUS_REFUSED"),
    ("STATUS_FAILED", "STRUCTURES_STATUS_FAILED"),
    ("STATUS_PANICKED", "STRUCTURES_STATUS_PANICKED"),
    ("STATUS_POISONED", "STRUCTURES_STATUS_POISONED"),
    ("DType", "structures_dtype"),
    ("LogLevel", "structures_log_level"),
    ("TensorView", "structures_tensor_view"),
    ("Str", "structures_str"),
    ("Bytes", "structures_bytes"),
    ("Error", "structures_error"),
    ("Contract", "structures_contract"),
    ("BindArgs", "structures_bind_args"),
    ("CallCtx", "structures_call_ctx"),
    ("FormFacts", "structures_form_facts"),
    ("FormVTable", "structures_form_vtable"),
    ("DeviceVTable", "structures_device_vtable"),
    ("PluginVTable", "structures_plugin_vtable"),
    ("HostVTable", "structures_host_vtable"),
];

/// Why there is no header.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The definitions cannot be read.
    #[error("{}: cbindgen: {reason}", path.display())]
    Definitions {
        /// `abi.rs`.
        path: PathBuf,
        /// Its own words.
        reason: String,
    },
    /// The header cannot be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The header.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Where the committed header is.
pub fn committed() -> PathBuf {
    plugin_api().join("include").join("structures_plugin.h")
}

/// Where the definitions are.
pub fn definitions() -> PathBuf {
    plugin_api().join("src").join("abi.rs")
}

fn plugin_api() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// The text of the header.
///
/// # Errors
/// [`Error::Definitions`].
pub fn generate() -> Result<String, Error> {
    let path = definitions();
    let refused = |reason: String| Error::Definitions {
        path: path.clone(),
        reason,
    };
    let bindings = Builder::new()
        .with_config(config())
        .with_src(&path)
        .generate()
        .map_err(|e| refused(e.to_string()))?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).map_err(|e| refused(e.to_string()))?;
    Ok(for_c(&text))
}

/// Writes the header by rename.
///
/// # Errors
/// [`Error`].
pub fn write(path: &Path) -> Result<(), Error> {
    let text = generate()?;
    let failed = |source| Error::Write {
        path: path.to_path_buf(),
        source,
    };
    let fresh = path.with_extension("h.tmp");
    std::fs::write(&fresh, text).map_err(failed)?;
    std::fs::rename(&fresh, path).map_err(failed)
}

fn config() -> Config {
    let mut config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Both,
        braces: Braces::SameLine,
        line_length: 100,
        tab_width: 4,
        no_includes: true,
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C99,
        ..Config::default()
    };
    config.enumeration.prefix_with_name = true;
    config.enumeration.rename_variants = RenameRule::ScreamingSnakeCase;
    config.export.rename = NAMES
        .iter()
        .map(|(rust, c)| ((*rust).into(), (*c).into()))
        .collect();
    config.export.include = NAMES.iter().map(|(rust, _)| (*rust).into()).collect();
    config
}

/// What cbindgen made, with C names in its comments, without Rust's constants of a type, and with
/// the words and assertions around it.
fn for_c(generated: &str) -> String {
    let (mut body, mut comment) = (String::new(), String::new());
    for line in generated.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("//") {
            comment.push_str(&in_c_words(line));
            comment.push('\n');
            continue;
        }
        // Rust's `Bytes::EMPTY` and the like: initialisers that a C program writes as `{0}`.
        if !(trimmed.starts_with("#define structures_") && trimmed.contains('{')) {
            body.push_str(&comment);
            body.push_str(line);
            body.push('\n');
        }
        comment.clear();
    }
    let head = HEAD
        .replace("@API_VERSION@", API_VERSION)
        .replace("@C_SYMBOL@", C_SYMBOL);
    format!("{head}{}\n\n{}{TAIL}", body.trim(), assertions())
}

/// `[`Type::member`]` as a C reader knows it.
fn in_c_words(line: &str) -> String {
    let mut text = line.replace("[`", "`").replace("`]", "`");
    for rust in [
        "size_of::<Contract>()",
        "size_of::<BindArgs>()",
        "size_of::<CallCtx>()",
    ] {
        let name = &rust["size_of::<".len()..rust.len() - ">()".len()];
        text = text.replace(rust, &format!("sizeof({})", c_name(name).unwrap_or(name)));
    }
    text = text.replace("`Error::EMPTY`", "zeroes");
    let parts: Vec<String> = text
        .split('`')
        .enumerate()
        .map(|(i, part)| match part.split_once("::") {
            _ if i % 2 == 0 => part.to_string(),
            Some((name, member)) if c_name(name).is_some() => {
                format!("`{}.{member}`", c_name(name).unwrap_or(name))
            }
            _ => format!("`{}`", c_name(part).unwrap_or(part)),
        })
        .collect();
    parts.concat()
}

fn c_name(rust: &str) -> Option<&'static str> {
    NAMES.iter().find(|(r, _)| *r == rust).map(|(_, c)| *c)
}

/// One assertion a size and an offset, for a 64-bit machine.
fn assertions() -> String {
    let mut text = String::from(
        "/* The layout, as the host's compiler has it. The host asserts the same numbers. */\n",
    );
    for layout in LAYOUTS {
        let name = c_name(layout.name).unwrap_or(layout.name);
        text.push_str(&format!(
            "STRUCTURES_ASSERT(sizeof({name}) == {}, \"size of {name}\");\n",
            layout.size
        ));
        for (field, offset) in layout.fields {
            text.push_str(&format!(
                "STRUCTURES_ASSERT(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n"
            ));
        }
        if let Some(size) = layout.size_1_0 {
            text.push_str(&format!(
                "#define {}_SIZE_1_0 {size}\n",
                name.to_uppercase()
            ));
        }
    }
    text
}

const HEAD: &str = include_str!("head.txt");
const TAIL: &str = include_str!("tail.txt");
