//! A GPU made of a C++ compiler: the kernels of `cu/` built for the CPU behind the driver's own interface, and a
//! compiler that compiles nothing. Both take the names of the real libraries, so that a plugin opened in this process,
//! or a program started with [`Fakes::search_path`], finds them where it would find those.

#![allow(dead_code, clippy::expect_used, clippy::unwrap_used)] // each test binary uses its part; a panic is a failure

use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use structures_plugin_cuda::kernels::{Abilities, FILES};

/// Where the fakes were built.
pub struct Fakes {
    dir: PathBuf,
}

impl Fakes {
    /// Builds them once a process; `None`, with the reason printed, where there is no C++ compiler.
    pub fn built() -> Option<&'static Fakes> {
        static FAKES: OnceLock<Option<Fakes>> = OnceLock::new();
        FAKES.get_or_init(build).as_ref()
    }

    /// Opens them in this process. Whoever asks for the libraries by name afterwards gets these.
    pub fn open(&self) {
        static OPEN: OnceLock<Vec<libloading::Library>> = OnceLock::new();
        OPEN.get_or_init(|| {
            let open = |name: &str| {
                // SAFETY: libraries built above; their initialisers do nothing.
                unsafe { libloading::Library::new(self.dir.join(name)) }.expect("opens")
            };
            std::env::set_var("STRUCTURES_NVRTC", self.nvrtc());
            std::env::set_var("STRUCTURES_CACHE_DIR", self.dir.with_extension("cache"));
            vec![open("libcuda.so"), open("libcublasLt.so")]
        });
    }

    /// The compiler.
    pub fn nvrtc(&self) -> PathBuf {
        self.dir.join("libfake-nvrtc.so")
    }

    /// Where both lie.
    pub fn search_path(&self) -> &Path {
        &self.dir
    }
}

fn build() -> Option<Fakes> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shim = root.join("tests/shim");
    // Every test may be a process of its own: what was built from the same sources is taken again.
    let mut hasher = std::hash::DefaultHasher::new();
    for place in [&shim, &root.join("cu")] {
        let list = std::fs::read_dir(place).expect("lists");
        let mut files: Vec<PathBuf> = list.map(|entry| entry.expect("an entry").path()).collect();
        files.sort();
        for file in files {
            std::fs::read(&file).expect("reads").hash(&mut hasher);
        }
    }
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let kept = place.join(format!("fakes-{:016x}", hasher.finish()));
    if kept.is_dir() {
        return Some(Fakes { dir: kept });
    }
    let dir = place.join(format!("fakes-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("creates");
    let mut table = String::from("#include \"shim.h\"\n");
    for file in FILES {
        table += &format!("#include \"{}.cu\"\n", file.name);
    }
    table += "extern const shim::Kernel KERNELS[] = {\n";
    let mut count = 0;
    for name in FILES.iter().flat_map(|file| file.kernels(Abilities::ALL)) {
        table +=
            &format!("  {{\"{name}\", shim::Thunk<{name}>::call, shim::Thunk<{name}>::sizes}},\n");
        count += 1;
    }
    table += &format!("}};\nextern const unsigned KERNEL_COUNT = {count};\n");
    let kernels = dir.join("kernels.cpp");
    std::fs::write(&kernels, table).expect("writes");
    let compile = |name: &str, sources: &[&Path]| -> Result<(), String> {
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command
            .args(["-std=c++17", "-O3", "-U_FORTIFY_SOURCE", "-fPIC", "-shared"])
            .args(["-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"])
            .arg(format!("-Wl,-soname,{name}"))
            .arg("-I")
            .arg(&shim)
            .arg("-I")
            .arg(root.join("cu"))
            .args(["-x", "c++"])
            .args(sources)
            .arg("-o")
            .arg(dir.join(name));
        let out = command
            .output()
            .map_err(|e| format!("no C++ compiler: {e}"))?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success() && said.is_empty(), "{name}:\n{said}");
        Ok(())
    };
    let all = compile("libcuda.so", &[&kernels, &shim.join("driver.cpp")])
        .and_then(|()| compile("libcublasLt.so", &[&shim.join("lt.cpp")]))
        .and_then(|()| compile("libfake-nvrtc.so", &[&shim.join("nvrtc.cpp")]));
    match all {
        Ok(()) => {
            if std::fs::rename(&dir, &kept).is_err() {
                // Somebody else was first.
                let _ = std::fs::remove_dir_all(&dir);
            }
            Some(Fakes { dir: kept })
        }
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}
