//! Detached signatures: `<name>.so.sig` beside `<name>.so`, and the keys the operator trusts.
//!
//! A signature file is one line, `ed25519 <public key> <signature>`, both in hexadecimal: it says which key made it,
//! so that "altered" and "signed by somebody you do not trust" are two answers. Trusted keys are `*.pub` files in
//! one directory, PEM as OpenSSL writes it (`openssl pkey -pubout`). Without keys nothing is verified and the state
//! is only shown. With keys, a signature that does not fit its file is always a refusal; whether an unsigned file or
//! an unknown key is one is the caller's choice (`--require-signed`).

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::DecodePublicKey;
use ed25519_dalek::{Signature, VerifyingKey};
use serde::Serialize;

use crate::code::{Code, Refusal};
use crate::elf::LARGEST;
use crate::error::LoaderError;
use crate::paths;

const LONGEST: u64 = 64 * 1024;
const SCHEME: &str = "ed25519";

/// What is known about who made a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum SignatureState {
    /// There is no signature file.
    Unsigned,
    /// There is one, and no key is configured to verify it.
    Unverified,
    /// It fits the file and was made by this trusted key.
    Trusted {
        /// Name of the key's file.
        key: String,
    },
    /// It fits the file and was made by a key that is not trusted.
    Untrusted {
        /// The key, in hexadecimal.
        key: String,
    },
    /// It does not fit the file.
    Bad,
}

impl fmt::Display for SignatureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SignatureState::Unsigned => f.write_str("unsigned"),
            SignatureState::Unverified => f.write_str("unverified"),
            SignatureState::Trusted { key } => write!(f, "trusted ({key})"),
            SignatureState::Untrusted { key } => write!(f, "untrusted ({key})"),
            SignatureState::Bad => f.write_str("bad"),
        }
    }
}

/// The keys an operator trusts.
#[derive(Debug, Default)]
pub(crate) struct TrustedKeys {
    dir: Option<PathBuf>,
    keys: Vec<(String, VerifyingKey)>,
}

/// A signature file, read.
struct Signed {
    /// Its words, as they are remembered.
    line: String,
    key: VerifyingKey,
    signature: Signature,
}

/// What became of a signature.
pub(crate) struct Judged {
    pub(crate) state: SignatureState,
    pub(crate) answer: Result<(), Refusal>,
    /// The line that was verified against the bytes now.
    pub(crate) verified: Option<String>,
}

/// Where the signature of `library` would be.
pub(crate) fn path_of(library: &Path) -> PathBuf {
    let mut name = library.as_os_str().to_owned();
    name.push(".sig");
    PathBuf::from(name)
}

/// Whether there is a signature file at all.
pub(crate) fn present(library: &Path) -> bool {
    path_of(library).symlink_metadata().is_ok()
}

impl TrustedKeys {
    /// Reads `*.pub` of `dir`. `named`: a person named the directory, so its absence is an error.
    ///
    /// # Errors
    /// [`LoaderError::TrustedKeys`] when a named directory cannot be listed, or a key in it cannot be used: a key
    /// that is silently left out would turn its owner's plugins into strangers'.
    pub(crate) fn read(dir: Option<&Path>, named: bool) -> Result<Self, LoaderError> {
        let Some(dir) = dir else {
            return Ok(TrustedKeys::default());
        };
        let bad = |path: &Path, reason: String| LoaderError::TrustedKeys {
            path: path.to_path_buf(),
            reason,
        };
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(e) if !named && e.kind() == std::io::ErrorKind::NotFound => {
                return Ok(TrustedKeys::default());
            }
            Err(e) => return Err(bad(dir, e.to_string())),
        };
        let mut keys = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| bad(dir, e.to_string()))?.path();
            if path.extension().is_some_and(|e| e == "pub") {
                let key = public_key(&path).map_err(|reason| bad(&path, reason))?;
                keys.push((file_name(&path), key));
            }
        }
        keys.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(TrustedKeys {
            dir: Some(dir.to_path_buf()),
            keys,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Judges the signature of `library`, whose bytes are those of `file`. `known` is a line that was found to fit
    /// these bytes before: the same line fits them again. Whose key it is, is asked every time.
    pub(crate) fn judge(
        &self,
        library: &Path,
        known: Option<&str>,
        file: impl FnOnce() -> std::io::Result<std::fs::File>,
        required: bool,
    ) -> Judged {
        let judged = |(state, answer), verified| Judged {
            state,
            answer,
            verified,
        };
        if !present(library) {
            let missing = Code::SignatureMissing.because(format!(
                "expected {}, found none",
                file_name(&path_of(library))
            ));
            let answer = if required { Err(missing) } else { Ok(()) };
            return judged((SignatureState::Unsigned, answer), None);
        }
        if self.is_empty() && !required {
            return judged((SignatureState::Unverified, Ok(())), None);
        }
        let verified = Signed::read(&path_of(library)).and_then(|signed| {
            if known == Some(signed.line.as_str()) {
                return Ok((signed, false));
            }
            let mut bytes = Vec::new();
            file()
                .and_then(|f| f.take(LARGEST + 1).read_to_end(&mut bytes))
                .map_err(|e| e.to_string())?;
            if bytes.len() as u64 > LARGEST {
                return Err(format!("expected a library of at most {LARGEST} bytes"));
            }
            signed
                .key
                .verify_strict(&bytes, &signed.signature)
                .map_err(|_| {
                    "it does not fit the library: one of the two was altered".to_string()
                })?;
            Ok((signed, true))
        });
        match verified {
            Err(why) => {
                let text = format!("{}: {why}", file_name(&path_of(library)));
                let bad = Err(Code::SignatureBad.because(text));
                judged((SignatureState::Bad, bad), None)
            }
            Ok((signed, now)) => judged(
                self.known(&signed.key, required),
                now.then_some(signed.line),
            ),
        }
    }

    fn known(&self, key: &VerifyingKey, required: bool) -> (SignatureState, Result<(), Refusal>) {
        if let Some((name, _)) = self.keys.iter().find(|(_, k)| k == key) {
            return (SignatureState::Trusted { key: name.clone() }, Ok(()));
        }
        let key = hex(key.as_bytes());
        let refusal = Code::SignatureUntrusted.because(format!(
            "signed by {key}, which is none of the {} trusted keys{}",
            self.keys.len(),
            self.dir
                .as_ref()
                .map(|d| format!(" in {}", d.display()))
                .unwrap_or_default()
        ));
        (
            SignatureState::Untrusted { key },
            if required { Err(refusal) } else { Ok(()) },
        )
    }
}

impl Signed {
    fn read(path: &Path) -> Result<Self, String> {
        let text = read_text(path)?;
        let words: Vec<&str> = text.split_whitespace().collect();
        let [SCHEME, key, signature] = words.as_slice() else {
            return Err(format!("expected `{SCHEME} <public key> <signature>`"));
        };
        let key = unhex::<32>(key).ok_or("expected a public key of 64 hexadecimal digits")?;
        let signature =
            unhex::<64>(signature).ok_or("expected a signature of 128 hexadecimal digits")?;
        Ok(Signed {
            line: words.join(" "),
            key: VerifyingKey::from_bytes(&key).map_err(|e| e.to_string())?,
            signature: Signature::from_bytes(&signature),
        })
    }
}

fn public_key(path: &Path) -> Result<VerifyingKey, String> {
    let text = read_text(path)?;
    VerifyingKey::from_public_key_pem(&text)
        .map_err(|e| format!("expected an ed25519 public key in PEM ({e})"))
}

/// The rules for plugin files hold for keys and signatures too: whoever may write them decides what is trusted.
fn read_text(path: &Path) -> Result<String, String> {
    let opened = paths::open(path).map_err(|r| r.to_string())?;
    let mut text = String::new();
    opened
        .file
        .take(LONGEST)
        .read_to_string(&mut text)
        .map_err(|e| e.to_string())?;
    Ok(text)
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|d| d[0] << 4 | d[1]).collect();
    (digits.len() == 2 * N)
        .then(|| bytes.try_into().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
    use ed25519_dalek::pkcs8::EncodePublicKey;
    use ed25519_dalek::{Signer, SigningKey};

    use super::*;

    const BYTES: &[u8] = b"the bytes of a library";

    struct Place {
        _keep: tempfile::TempDir,
        library: PathBuf,
        keys: PathBuf,
    }

    fn place() -> Place {
        let keep = tempfile::tempdir().expect("temporary directory");
        let keys = keep.path().join("keys");
        fs::create_dir(&keys).expect("create");
        let library = keep.path().join("a.so");
        fs::write(&library, BYTES).expect("write");
        Place {
            _keep: keep,
            library,
            keys,
        }
    }

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    fn trust(p: &Place, name: &str, seed: u8) {
        let pem = key(seed)
            .verifying_key()
            .to_public_key_pem(LineEnding::LF)
            .expect("PEM");
        fs::write(p.keys.join(name), pem).expect("write");
    }

    fn sign(p: &Place, seed: u8, bytes: &[u8]) {
        let signature = key(seed).sign(bytes).to_bytes();
        let public = key(seed).verifying_key();
        let line = format!("ed25519 {} {}\n", hex(public.as_bytes()), hex(&signature));
        fs::write(path_of(&p.library), line).expect("write");
    }

    fn judged(p: &Place, required: bool) -> (SignatureState, Option<Code>) {
        let keys = TrustedKeys::read(Some(&p.keys), true).expect("keys");
        let file = || fs::File::open(&p.library);
        let judged = keys.judge(&p.library, None, file, required);
        (judged.state, judged.answer.err().map(|r| r.code))
    }

    #[test]
    fn without_keys_the_state_is_shown_only() {
        let p = place();
        assert_eq!(judged(&p, false), (SignatureState::Unsigned, None));
        sign(&p, 1, b"other bytes");
        assert_eq!(judged(&p, false), (SignatureState::Unverified, None));
        let missing = p.keys.join("none");
        let keys = TrustedKeys::read(Some(&missing), false).expect("absent");
        assert!(keys.is_empty());
        assert!(TrustedKeys::read(Some(&missing), true).is_err());
    }

    #[test]
    fn each_state_has_its_answer() {
        let p = place();
        trust(&p, "vendor.pub", 1);
        let missing = Some(Code::SignatureMissing);
        assert_eq!(judged(&p, false), (SignatureState::Unsigned, None));
        assert_eq!(judged(&p, true), (SignatureState::Unsigned, missing));

        sign(&p, 1, BYTES);
        let trusted = SignatureState::Trusted {
            key: "vendor.pub".into(),
        };
        assert_eq!(judged(&p, false), (trusted.clone(), None));
        assert_eq!(judged(&p, true), (trusted, None));

        sign(&p, 2, BYTES);
        for (required, code) in [(false, None), (true, Some(Code::SignatureUntrusted))] {
            let (state, found) = judged(&p, required);
            assert!(matches!(state, SignatureState::Untrusted { .. }));
            assert_eq!(found, code);
        }

        let bad = (SignatureState::Bad, Some(Code::SignatureBad));
        sign(&p, 1, b"other bytes");
        assert_eq!(judged(&p, false), bad);
        sign(&p, 1, BYTES);
        let good = fs::read_to_string(path_of(&p.library)).expect("read");
        for text in [
            "",
            "ed25519",
            &good[..good.len() - 2],
            &good.replacen("ed25519", "rsa", 1),
            &good.replace(' ', " z"),
        ] {
            fs::write(path_of(&p.library), text).expect("write");
            assert_eq!(judged(&p, true), bad, "{text}");
        }
        let mut bytes = BYTES.to_vec();
        bytes[3] ^= 1;
        fs::write(&p.library, bytes).expect("flip");
        fs::write(path_of(&p.library), &good).expect("write");
        assert_eq!(judged(&p, true), bad, "one bit");
    }

    #[test]
    fn a_line_that_was_verified_before_is_not_verified_again_and_another_one_is() {
        let p = place();
        trust(&p, "vendor.pub", 1);
        sign(&p, 1, BYTES);
        let keys = TrustedKeys::read(Some(&p.keys), true).expect("keys");
        let first = keys.judge(&p.library, None, || fs::File::open(&p.library), true);
        let line = first.verified.expect("verified now");
        let unread = || -> std::io::Result<fs::File> { panic!("the library is read") };
        let again = keys.judge(&p.library, Some(&line), unread, true);
        assert!(again.answer.is_ok() && again.verified.is_none());
        assert_eq!(again.state, first.state);
        // Whose key it is, is asked every time.
        fs::remove_file(p.keys.join("vendor.pub")).expect("remove");
        trust(&p, "other.pub", 2);
        let keys = TrustedKeys::read(Some(&p.keys), true).expect("keys");
        let again = keys.judge(&p.library, Some(&line), unread, true);
        let code = again.answer.err().map(|r| r.code);
        assert_eq!(code, Some(Code::SignatureUntrusted));
        // Another line is another claim.
        sign(&p, 2, b"other bytes");
        let file = || fs::File::open(&p.library);
        let other = keys.judge(&p.library, Some(&line), file, true);
        assert_eq!((other.state, other.verified), (SignatureState::Bad, None));
    }

    #[test]
    fn a_key_that_cannot_be_used_is_an_error_and_others_may_not_add_one() {
        let p = place();
        trust(&p, "good.pub", 1);
        fs::write(p.keys.join("notes.txt"), "not a key").expect("write");
        assert!(TrustedKeys::read(Some(&p.keys), false).is_ok());
        fs::write(p.keys.join("bad.pub"), "not a key").expect("write");
        let error = TrustedKeys::read(Some(&p.keys), false).expect_err("bad key");
        assert!(error.to_string().contains("bad.pub"), "{error}");
        fs::remove_file(p.keys.join("bad.pub")).expect("remove");
        let mode = fs::Permissions::from_mode(0o666);
        fs::set_permissions(p.keys.join("good.pub"), mode).expect("chmod");
        let error = TrustedKeys::read(Some(&p.keys), false).expect_err("public");
        assert!(error.to_string().contains("path_world_writable"), "{error}");
    }

    #[test]
    fn keys_and_signatures_of_openssl_fit() {
        // openssl genpkey -algorithm ed25519; openssl pkey -pubout; openssl pkeyutl -sign -rawin
        const PEM: &str = include_str!("../tests/data/openssl.pub");
        const LINE: &str = include_str!("../tests/data/openssl.sig");
        let p = place();
        fs::write(p.keys.join("openssl.pub"), PEM).expect("write");
        fs::write(path_of(&p.library), LINE).expect("write");
        assert!(matches!(judged(&p, true).0, SignatureState::Trusted { .. }));
    }
}
