# Run by moesaic_embed_files: writes OUTPUT from the files under FOLDER.
file(GLOB_RECURSE files LIST_DIRECTORIES false RELATIVE ${FOLDER} ${FOLDER}/*)
list(SORT files)
set(arrays "")
set(entries "")
set(index 0)
foreach(file ${files})
  file(READ ${FOLDER}/${file} hex HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  string(APPEND arrays "constexpr unsigned char kFile${index}[] = {${bytes}0};\n")
  string(APPEND entries "    WebFile{\"${file}\", Text(kFile${index})},\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE ${OUTPUT} "#include \"server/web_files.h\"

#include <array>
#include <cstddef>

namespace moesaic::server {
namespace {

${arrays}
// A zero stands behind the bytes.
template <size_t N>
std::string_view Text(const unsigned char (&bytes)[N]) {
  return {reinterpret_cast<const char*>(bytes), N - 1};
}

}  // namespace

std::span<const WebFile> WebFiles() {
  static const std::array<WebFile, ${index}> files = {
${entries}  };
  return files;
}

}  // namespace moesaic::server
")
